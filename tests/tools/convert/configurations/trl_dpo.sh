#!/bin/bash
# Full training of a small model
accelerate launch --num_processes 1 trl/scripts/dpo.py \
    --dataset_name rows/preferences.jsonl \
    --model_name_or_path tiny/decoder \
    --learning_rate 5.0e-7 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --max_length 48 \
    --beta 0.05 \
    --loss_type ipo \
    --lr_scheduler_type linear \
    --output_dir Qwen2-0.5B-DPO
