"""Names that other frameworks give to keys of a job: transformers, Megatron-Core, torchtitan,
DeepSpeed, PEFT, nanoGPT, axolotl and vLLM.

An unknown key of such a name is an error that names the key of the job, or how to say the same.
"""

from __future__ import annotations

from moesaic.facts.job.train import LayoutConfig

_BY_KEY = {
    "seed": "random_seed",
    "model": "moe architecture_config",
    "model.preset": "model.name model.flavor",
    "model.from": "model_name_or_path pretrained pretrained_model_name_or_path hf_path base_model "
    "init_from hf_assets_path initial_load_path model_path model_dir",
    "model.family": "model_type architectures architecture",
    "model.vocab": "vocab_size padded_vocab_size",
    "model.hidden": "hidden_size d_model n_embd dim embed_dim hidden_dim model_dim",
    "model.layers": "num_layers n_layers n_layer num_hidden_layers .depth model.depth",
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
    "model.rope_scaling.kind": "rope_scaling.type rope_scaling.rope_type rope_type",
    "routing.router": "router_type moe_router_type gate moe_router_load_balancing_type",
    "routing.balance_loss": "aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff aux_loss_alpha "
    "load_balance_coeff aux_loss balance_coef",
    "routing.z_loss": "router_z_loss_coef moe_z_loss_coeff z_loss_coef",
    "routing.capacity_factor": "moe_expert_capacity_factor expert_capacity train_capacity_factor",
    "routing.bias_update_rate": "moe_router_bias_update_rate bias_update_speed",
    "layout": "parallelism parallel parallel_dims parallelism_config",
    "layout.ep": "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep_size "
    "expert_parallel ep_degree",
    "layout.etp": "expert_tensor_parallel_size expert_tensor_parallel_degree etp_size etp_degree",
    "layout.tp": "tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size "
    "tensor_parallel tp_degree",
    "layout.pp": "pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree "
    "pp_size pipeline_parallel pp_degree",
    "layout.dp_shard": "fsdp data_parallel_shard_degree zero_stage zero_optimization "
    "sharding_strategy fsdp_size zero fully_shard use_distributed_optimizer dp_shard_degree "
    "fsdp_config zero_optimization.stage",
    "layout.schedule": "pipeline_parallel_schedule pipeline_schedule",
    "layout.dispatch": "moe_token_dispatcher_type",
    "kernels.grouped_mm": "moe_grouped_gemm grouped_gemm moe_implementation",
    "finetune": "lora peft lora_config peft_config",
    "finetune.method": "adapter peft_type",
    "finetune.rank": "lora_r lora_rank lora_dim .r finetune.r lora.r peft.r",
    "finetune.alpha": "lora_alpha",
    "finetune.targets": "target_modules lora_target_modules",
    "data": "data_loader dataloader dataset_config",
    "data.path": "dataset dataset_path data_path dataset_name train_file train_data datasets "
    "data.dataset data.name train_path data.dir data_dir train_files",
    "data.text_key": "column text_column text_field dataset_text_field",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_model tokenizer_name_or_path "
    "tokenizer.name tokenizer.path",
    "data.sequence": "seq_len seq_length sequence_length max_seq_len max_seq_length max_length "
    "block_size context_length cutoff_len sequence_len",
    "data.validation_path": "validation_file eval_dataset val_data valid_data_path val_path "
    "eval_file eval_path",
    "data.validation_share": "val_split validation_split_percentage test_size val_fraction "
    "val_set_size",
    "data.packing": "sample_packing",
    "data.end_token": "eos_token",
    "data.cache": "cache_dir data_cache_path",
    "train": "training trainer training_args training_arguments",
    "train.steps": "max_steps train_iters num_steps iterations iters total_steps "
    "num_training_steps training_steps max_iters epochs num_epochs num_train_epochs max_epochs "
    "train_epochs n_epochs",
    "train.batch": "batch_size global_batch_size train_batch_size per_device_train_batch_size "
    "train_batch",
    "train.micro_batches": "gradient_accumulation_steps grad_accum accumulate_grad_batches "
    "gradient_accumulation num_microbatches micro_batch_size micro_batch local_batch_size "
    "micro_bsz train_micro_batch_size_per_gpu",
    "train.precision": "dtype mixed_precision bf16 fp16 torch_dtype params_dtype",
    "train.recompute": "activation_checkpointing gradient_checkpointing activation_checkpoint "
    "recompute_granularity recompute_activations",
    "train.clip": "max_grad_norm clip_grad gradient_clipping grad_clip max_norm gradient_clip_val",
    "train.validate_every": "eval_interval eval_steps eval_every val_check_interval eval_iters "
    "validation_interval eval_strategy evals_per_epoch val_interval",
    "train.device": "device_type accelerator",
    "memory": "offload offload_optimizer cpu_offload",
    "optimizer.kind": "optim optimizer_name optimizer_type optimizer.name optimizer.type",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 momentum",
    "optimizer.epsilon": "adam_eps adam_epsilon eps",
    "optimizer.weight_decay": "wd",
    "optimizer.moments": "use_8bit_adam adam_8bit",
    "schedule.kind": "lr_scheduler lr_scheduler_type lr_decay_style scheduler decay_style "
    "schedule.type schedule.name decay_type",
    "schedule.warmup": "warmup_steps lr_warmup_iters num_warmup_steps warmup_iters "
    "lr_warmup_steps warmup_ratio warmup_fraction lr_warmup_fraction",
    "schedule.final": "min_lr min_lr_ratio lr_min end_lr min_lr_factor",
    "checkpoint.every": "save_interval save_steps save_every checkpoint_interval save_freq "
    "checkpoint.interval checkpoint.freq saves_per_epoch save_strategy",
    "checkpoint.keep": "save_total_limit keep_latest_k max_checkpoints",
    "checkpoint.asynchronous": "async_save async_mode async_checkpoint",
    "log.wandb": "wandb_project report_to wandb_log enable_wandb",
    "log.mlflow": "mlflow_experiment",
    "log.tensorboard": "enable_tensorboard tensorboard_dir",
    "log": "metrics logging logger",
}
"""Other names by key, separated by spaces; TABLE.NAME is a name in this table alone, and
.NAME at the top."""

_BY_WAY = {
    "give the directory of the run as a flag, --out DIR": (
        "output_dir out_dir save_dir logging_dir log_dir run_dir dump_folder ckpt_dir "
        "checkpoint_dir default_root_dir save_path .save train.save checkpoint.dir checkpoint.path "
        "checkpoint.folder log.dir"
    ),
    "a run has the name of its directory, the flag --out DIR": (
        ".name train.name log.name job.name experiment.name run_name experiment_name job_name"
    ),
    "resume by flags, --out DIR --resume": (
        "resume_from_checkpoint resume resume_from load_checkpoint auto_resume .load train.load "
        "checkpoint.load ckpt_path"
    ),
    "give the number of ranks as a flag, --nproc N": (
        "nproc nproc_per_node num_gpus n_gpus gpus n_gpu world_size num_processes devices"
    ),
    "start moesaic train on each host by torchrun, and plan with --cluster": (
        "nnodes num_nodes nodes n_nodes"
    ),
    "remove it, all ranks (--nproc N) that layout.tp and layout.pp leave are data parallel, and "
    "layout.dp_shard shards the weights over them": (
        "dp dp_degree dp_size data_parallel data_parallel_size data_parallel_degree ddp "
        "dp_replicate data_parallel_replicate_degree dp_replicate_degree"
    ),
    "remove it, a sequence is split over layout.tp at most": (
        "cp cp_size context_parallel context_parallel_size context_parallel_degree"
    ),
    "remove it, layout.tp splits the sequence between blocks too": (
        "sequence_parallel enable_sequence_parallel"
    ),
    "give train.steps, which counts steps: epochs * samples of the data / train.batch": (
        "epochs num_epochs num_train_epochs max_epochs train_epochs n_epochs"
    ),
    "give train.batch, the samples of a step on all ranks: size * ranks * micro-batches": (
        "per_device_train_batch_size batch_size_per_gpu per_device_batch_size"
    ),
    "give train.micro_batches, their number: train.batch / (size * data-parallel ranks)": (
        "micro_batch_size micro_batch local_batch_size micro_bsz train_micro_batch_size_per_gpu"
    ),
    "give schedule.warmup, which counts steps": ("warmup_ratio warmup_fraction lr_warmup_fraction"),
    "give schedule.final, a fraction of optimizer.lr": ("min_lr lr_min end_lr"),
    'remove it, the schedule decays until train.steps (schedule.kind = "constant" does not)': (
        "lr_decay_iters lr_decay_steps decay_lr decay_steps"
    ),
    "remove it, every step is logged (log.loads_every is for expert loads alone)": (
        "log_every logging_steps log_interval log_freq log_every_n_steps steps_per_print "
        "print_every logging_strategy log.every log.interval log.freq"
    ),
    "remove it, moesaic has no dropout": (
        "dropout attention_dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop lora_dropout"
    ),
    "remove it, ranks read samples themselves, in an order that seed shuffles": (
        "shuffle num_workers dataloader_num_workers num_data_workers prefetch_factor pin_memory"
    ),
    "remove it, model.family chooses it": (
        "hidden_act activation activation_function swiglu normalization position_embedding_type "
        "attention_bias use_bias .bias model.bias"
    ),
    "remove it, moesaic has no choice of attention kernels": (
        "attn_implementation flash_attention use_flash_attn flash_attn attention_backend"
    ),
    "remove it, models are not compiled": ("compile torch_compile"),
}
"""Names by how to say the same in a job or a command, where no key says it alone."""

_OF_RECOMMENDERS = {
    "model.dim": "embedding_dim embed_dim emb_dim embedding_size emb_size embedding_dimension "
    "sparse_feature_size d_model n_embd model_dim",
    "model.hidden": "mlp hidden_units hidden_sizes mlp_dims top_mlp deep_layers dnn_hidden_units "
    "hidden_layers",
    "model.dense_hidden": "bottom_mlp",
    "model.cross_layers": "num_cross_layers cross_num dcn_num_layers",
    "table": "embedding embeddings embedding_table sparse_table embedding_bag",
    "table.optimizer": "sparse_optimizer embedding_optimizer",
    "table.lr": "table.learning_rate embedding.learning_rate embedding_lr sparse_lr "
    "sparse_learning_rate embedding_learning_rate",
    "table.max_rows": "capacity max_capacity max_entries num_embeddings hash_size max_ind_range",
    "table.host": "cache_size",
    "table.evict_days": "ttl time_to_live expire_days",
    "table.admit_count": "min_count min_frequency filter_freq admission_threshold",
    "data.slots": "sparse sparse_features sparse_columns categorical categorical_features "
    "categorical_columns cat_features cat_columns id_features",
    "data.dense": "dense_features dense_columns numerical numerical_features numeric_features "
    "numeric_columns int_features",
    "data.label": "label_column label_name target target_column",
}
"""Other names by key of a recommender's job, as in TorchRec, DLRM, HugeCTR and DeepCTR."""

_WAYS_OF_RECOMMENDERS = {
    "give model.hidden without the last width, which is the output": (
        "arch_mlp_top over_arch_layer_sizes"
    ),
    "give model.dense_hidden without the inputs and without the last width, which is model.dim": (
        "arch_mlp_bot dense_arch_layer_sizes"
    ),
    "remove it, a recommender recomputes nothing": (
        "activation_checkpointing gradient_checkpointing activation_checkpoint "
        "recompute_granularity recompute_activations"
    ),
    "remove it, a recommender keeps its moments in full": "use_8bit_adam adam_8bit",
}
_NO_LAYOUT = "remove it, a recommender has no layout: give the number of ranks as a flag, --nproc N"


def _by_name(names: dict[str, str]) -> dict[str, str]:
    return {name: key for key, written in names.items() for name in written.split()}


OTHER_NAMES = _by_name(_BY_KEY)
"""Key of a language model's job by another name."""
OTHER_WAYS = _by_name(_BY_WAY)
"""How to say the same, by another name."""
CTR_NAMES = OTHER_NAMES | _by_name(_OF_RECOMMENDERS)
"""Key of a recommender's job by another name."""
CTR_WAYS = (
    {name: _NO_LAYOUT if "layout." in way else way for name, way in OTHER_WAYS.items()}
    | {name: _NO_LAYOUT for name, key in OTHER_NAMES.items() if key.startswith("layout")}
    | {f"layout.{name}": _NO_LAYOUT for name in LayoutConfig.model_fields}
    | {"layout": _NO_LAYOUT}
    | _by_name(_WAYS_OF_RECOMMENDERS)
)
"""Advice by a name that no key of a recommender's job replaces."""
