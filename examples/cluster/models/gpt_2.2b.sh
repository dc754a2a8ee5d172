# Sourced: the GPT of 2.2 billion parameters of the PipeDream-2BW paper, with batches of 512 (section 5.1).
program=pretrain_gpt.py
GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
. "$here/models/2bw.sh"
