#!/usr/bin/env bash
# Makes BERT's training data of the quickstart's text in a directory; what is there already is kept.
#
#   bash examples/quickstart/prepare_bert_data.sh outputs/bert/data
#
# corpus.jsonl      CPython's reference topics, one document a line
# vocab.txt         a WordPiece vocabulary trained on them
# corpus_text_sentence.bin, .idx   the token ids, sentence by sentence, in Megatron's format
set -euo pipefail
data="$1"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$data"

# Each step writes to a name of its own first, so that an interrupted one leaves nothing that looks complete.
if [ ! -f "$data/corpus.jsonl" ]; then
    python "$here/make_corpus.py" "$data/corpus.partial"
    mv "$data/corpus.partial" "$data/corpus.jsonl"
fi
if [ ! -f "$data/vocab.txt" ]; then
    python "$here/train_wordpiece.py" "$data/corpus.jsonl" "$data/vocab.partial" --vocab-size 1024
    mv "$data/vocab.partial" "$data/vocab.txt"
fi
if [ ! -f "$data/corpus_text_sentence.bin" ] || [ ! -f "$data/corpus_text_sentence.idx" ]; then
    python "$here/../../tools/preprocess_data.py" --input "$data/corpus.jsonl" --output-prefix "$data/corpus" \
        --tokenizer-type BertWordPieceLowerCase --vocab-file "$data/vocab.txt" --split-sentences
fi
