#!/usr/bin/env bash
MQO_QUANT_CONFIG=/somewhere/sweep/llama32-1b_wikipedia_bf16_seed2/quant.toml \
  CUDA_DEVICE_MAX_CONNECTIONS=1 \
  OMP_NUM_THREADS=2 \
  HF_HUB_OFFLINE=1 \
  TOKENIZERS_PARALLELISM=false \
  MALLOC_MMAP_MAX_=0 \
  MALLOC_TRIM_THRESHOLD_=1099511627776 \
  OMP_WAIT_POLICY=PASSIVE \
  /somewhere/mqo/.venv/bin/python -m torch.distributed.run \
  --nproc-per-node 1 \
  --standalone /somewhere/sweep/llama32-1b_wikipedia_bf16_seed2/source/pretrain_gpt.py \
  --num-layers 2 \
  --hidden-size 256 \
  --ffn-hidden-size 1024 \
  --num-attention-heads 8 \
  --group-query-attention \
  --num-query-groups 2 \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --swiglu \
  --disable-bias-linear \
  --attention-dropout 0 \
  --hidden-dropout 0 \
  --position-embedding-type rope \
  --rotary-base 500000 \
  --use-rope-scaling \
  --rope-scaling-factor 32 \
  --seq-length 64 \
  --max-position-embeddings 64 \
  --make-vocab-size-divisible-by 128 \
  --micro-batch-size 4 \
  --global-batch-size 4 \
  --train-samples 32 \
  --lr 0.002 \
  --min-lr 0.0002 \
  --lr-decay-style cosine \
  --lr-warmup-fraction 0.1 \
  --adam-beta1 0.9 \
  --adam-beta2 0.95 \
  --weight-decay 0.1 \
  --clip-grad 1.0 \
  --init-method-std 0.02 \
  --seed 1234 \
  --transformer-impl local \
  --no-persist-layer-norm \
  --no-gradient-accumulation-fusion \
  --no-masked-softmax-fusion \
  --no-rope-fusion \
  --distributed-backend gloo \
  --use-cpu-initialization \
  --no-bias-swiglu-fusion \
  --no-bias-dropout-fusion \
  --num-workers 0 \
  --tokenizer-type HuggingFaceTokenizer \
  --tokenizer-model /somewhere/mqo/data/wikipedia/tokenizer \
  --data-path /somewhere/mqo/data/wikipedia/wikipedia_text_document \
  --data-cache-path /somewhere/mqo/.cache/indices \
  --split 90,10,0 \
  --no-create-attention-mask-in-dataloader \
  --eval-interval 8 \
  --eval-iters 1 \
  --log-interval 1 \
  --tensorboard-log-interval 1 \
  --tensorboard-dir /somewhere/sweep/llama32-1b_wikipedia_bf16_seed2/tensorboard \
  --log-timers-to-tensorboard \
  --exit-signal-handler \
  --verify-integrity \
  --seed 2
