# Sourced: the BERT of examples/convergence.sh. Needs $data, the directory of prepare_bert_data.sh.
#
# 0.8 million parameters; a global batch is 4 microbatches of 8 sequences of 64 tokens, 15% of which are to be predicted.
model_args=(
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --attention-dropout 0.0 --hidden-dropout 0.0
)
training_args=(
    --micro-batch-size 8 --global-batch-size 32 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --clip-grad 1.0 --seed 1234
)
# The text is small: reading it in the training process itself leaves the cores to training.
data_args=(
    --data-path "$data/corpus_text_sentence" --data-cache-path "$data/cache" --split 90,10,0 --num-workers 0
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$data/vocab.txt"
)
