# Sourced: the BERT of 2.2 billion parameters of the PipeDream-2BW paper, with batches of 1024 (section 5.1). VOCAB_FILE is
# a WordPiece vocabulary, and DATA_PATH was made with --split-sentences.
program=pretrain_bert.py
GLOBAL_BATCH="${GLOBAL_BATCH:-1024}"
. "$here/models/2bw.sh"
