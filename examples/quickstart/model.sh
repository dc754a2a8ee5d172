# Sourced: what the quickstart and the convergence experiment train. Needs $data, the directory of prepare_data.sh.
#
# 1.0 million parameters; a global batch is 4 microbatches of 4 sequences, 2,048 tokens.
model_args=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0
)
training_args=(
    --micro-batch-size 4 --global-batch-size 16 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine
    --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
)
# The text is small: reading it in the training process itself leaves the cores to training.
data_args=(
    --data-path "$data/corpus_text_document" --data-cache-path "$data/cache" --split 90,10,0 --num-workers 0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model"
)
