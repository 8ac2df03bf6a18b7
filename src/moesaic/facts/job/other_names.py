"""Names that other frameworks give to keys of a job: transformers, Megatron-Core, torchtitan,
DeepSpeed, PEFT and vLLM.

An unknown key of such a name is an error that names the key of the job.
"""

from __future__ import annotations

_BY_KEY = {
    "model.from": "model_name_or_path pretrained pretrained_model_name_or_path hf_path",
    "model.family": "model_type architectures architecture",
    "model.vocab": "vocab_size padded_vocab_size",
    "model.hidden": "hidden_size d_model n_embd dim embed_dim hidden_dim model_dim",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
    "model.heads": "num_attention_heads num_heads n_heads n_head attention_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_kv_heads num_query_groups",
    "model.head_dim": "kv_channels head_size",
    "model.ffn": "intermediate_size ffn_hidden_size moe_intermediate_size moe_ffn_hidden_size "
    "ffn_dim d_ff mlp_dim moe_inter_dim",
    "model.experts": "num_experts num_local_experts n_routed_experts num_moe_experts n_experts "
    "moe_num_experts",
    "model.top_k": "experts_per_token num_experts_per_tok num_experts_per_token "
    "n_activated_experts moe_router_topk router_topk moe_top_k topk moe_k",
    "model.renormalise": "norm_topk_prob renormalize",
    "model.dense_layers": "first_k_dense_replace n_dense_layers",
    "model.shared_experts": "n_shared_experts num_shared_experts",
    "model.expert_groups": "n_group moe_router_num_groups",
    "model.top_expert_groups": "topk_group moe_router_group_topk",
    "model.tied": "tie_word_embeddings tie_embeddings weight_tying",
    "model.norm_epsilon": "rms_norm_eps layer_norm_eps layernorm_epsilon norm_eps",
    "model.rope_theta": "rotary_base rope_base rotary_emb_base",
    "model.window": "sliding_window window_size",
    "model.max_positions": "max_position_embeddings n_positions",
    "model.init_std": "initializer_range init_method_std",
    "routing.router": "router_type moe_router_type gate",
    "routing.balance_loss": "aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha "
    "load_balance_coeff aux_loss balance_coef",
    "routing.z_loss": "router_z_loss_coef moe_z_loss_coeff z_loss_coef",
    "routing.capacity_factor": "moe_expert_capacity_factor expert_capacity train_capacity_factor",
    "routing.bias_update_rate": "moe_router_bias_update_rate bias_update_speed",
    "layout": "parallelism parallel parallel_dims parallelism_config",
    "layout.ep": "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep_size "
    "expert_parallel",
    "layout.etp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "layout.tp": "tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size "
    "tensor_parallel",
    "layout.pp": "pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree "
    "pp_size pipeline_parallel",
    "layout.dp_shard": "fsdp data_parallel_shard_degree zero_stage zero_optimization "
    "sharding_strategy fsdp_size",
    "layout.schedule": "pipeline_parallel_schedule pipeline_schedule",
    "layout.dispatch": "moe_token_dispatcher_type",
    "finetune.rank": "lora_r lora_rank lora_dim",
    "finetune.alpha": "lora_alpha",
    "finetune.targets": "target_modules lora_target_modules",
    "data.path": "dataset dataset_path data_path dataset_name train_file train_data",
    "data.text_key": "column text_column text_field dataset_text_field",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_model tokenizer_name_or_path",
    "data.sequence": "seq_len seq_length sequence_length max_seq_len max_seq_length max_length "
    "block_size context_length cutoff_len",
    "data.validation_path": "validation_file eval_dataset val_data valid_data_path",
    "data.validation_share": "val_split validation_split_percentage test_size val_fraction",
    "train.steps": "max_steps train_iters num_steps iterations iters total_steps "
    "num_training_steps training_steps",
    "train.batch": "batch_size global_batch_size train_batch_size "
    "per_device_train_batch_size train_batch",
    "train.micro_batches": "gradient_accumulation_steps grad_accum accumulate_grad_batches "
    "gradient_accumulation num_microbatches",
    "train.precision": "dtype mixed_precision bf16 fp16 torch_dtype params_dtype",
    "train.recompute": "activation_checkpointing gradient_checkpointing activation_checkpoint "
    "recompute_granularity recompute_activations",
    "train.clip": "max_grad_norm clip_grad gradient_clipping grad_clip max_norm gradient_clip_val",
    "train.validate_every": "eval_interval eval_steps eval_every val_check_interval eval_iters",
    "optimizer.kind": "optim optimizer_name optimizer_type",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.epsilon": "adam_eps adam_epsilon eps",
    "optimizer.weight_decay": "wd",
    "schedule.kind": "lr_scheduler lr_scheduler_type lr_decay_style scheduler decay_style",
    "schedule.warmup": "warmup_steps lr_warmup_iters num_warmup_steps warmup_iters lr_warmup_steps",
    "schedule.final": "min_lr min_lr_ratio lr_min end_lr min_lr_factor",
    "checkpoint.every": "save_interval save_steps save_every checkpoint_interval save_freq",
    "checkpoint.keep": "save_total_limit keep_latest_k max_checkpoints",
    "log.wandb": "wandb_project report_to",
    "log.mlflow": "mlflow_experiment",
}
"""Other names by key, separated by spaces."""

OTHER_NAMES = {name: key for key, names in _BY_KEY.items() for name in names.split()}
"""Key of a job by another name."""
