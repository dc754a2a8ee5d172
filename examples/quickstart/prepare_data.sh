#!/usr/bin/env bash
# Makes the quickstart's training data in a directory; what is there already is kept.
#
#   bash examples/quickstart/prepare_data.sh outputs/quickstart/data
#
# corpus.jsonl      CPython's reference topics, one document a line
# tokenizer.model   a SentencePiece tokenizer trained on them
# corpus_text_document.bin, .idx   the token ids, in Megatron's format
set -euo pipefail
data="$1"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$data"

# Each step writes to a name of its own first, so that an interrupted one leaves nothing that looks complete.
if [ ! -f "$data/corpus.jsonl" ]; then
    python "$here/make_corpus.py" "$data/corpus.partial"
    mv "$data/corpus.partial" "$data/corpus.jsonl"
fi
if [ ! -f "$data/tokenizer.model" ]; then
    python "$here/train_tokenizer.py" "$data/corpus.jsonl" "$data/tokenizer.partial" --vocab-size 1024
    mv "$data/tokenizer.partial" "$data/tokenizer.model"
fi
if [ ! -f "$data/corpus_text_document.bin" ] || [ ! -f "$data/corpus_text_document.idx" ]; then
    python "$here/../../tools/preprocess_data.py" --input "$data/corpus.jsonl" --output-prefix "$data/corpus" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model" --append-eod
fi
