"""Config keys by the words that torch and other libraries use for them.

For hints on unknown keys: spelling alone finds `learning_rat`, but not the meaning of `lr` or `max_epochs`.
"""

WORDS: dict[str, str] = {
    "optimizer.learning_rate": "lr base_lr max_lr peak_lr init_lr initial_lr",
    "optimizer.reference_batch_size": "reference_batch base_batch_size",
    "optimizer.rule": "lr_scaling scale_lr lr_rule scaling_rule",
    "optimizer.betas": "beta beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.epsilon": "eps adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd decay l2",
    "optimizer.clip_norm": "clip grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip gradient_clip_val",
    "optimizer.name": "optim opt optimizer_name",
    "schedule.name": "scheduler lr_scheduler lr_schedule lr_scheduler_type sched reduce_lr_on_plateau",
    "schedule.warmup": "warmup_steps num_warmup_steps warmup_epochs warmup_iters warmup_ratio lr_warmup",
    "schedule.factor": "lr_factor reduce_factor gamma",
    "schedule.patience": "lr_patience",
    "schedule.length": "lr_decay_iters decay_steps decay_epochs t_max total_steps",
    "schedule.final_ratio": "min_lr eta_min min_learning_rate final_lr",
    "stop.after": "epoch epochs num_epochs n_epochs max_epochs train_epochs num_train_epochs steps max_steps num_steps "
    "train_steps max_iters iterations iters num_iterations",
    "stop.at": "target goal target_accuracy stop_at",
    "batch.global_size": "batch_size bs batchsize train_batch_size global_batch_size global_batch total_batch_size",
    "batch.micro_size": "micro_batch micro_batch_size microbatch per_device_train_batch_size per_device_batch_size "
    "device_batch_size train_micro_batch_size_per_gpu grad_accum gradient_accumulation gradient_accumulation_steps "
    "accumulate_grad_batches accumulation accumulation_steps accum_steps",
    "evaluation.every": "eval_every eval_interval eval_steps eval_strategy evaluation_strategy val_check_interval "
    "check_val_every_n_epoch validate_every val_every",
    "evaluation.micro_size": "evaluation_batch_size eval_batch_size per_device_eval_batch_size val_batch_size",
    "scale.workers": "num_workers world_size nproc nproc_per_node num_processes n_workers ranks num_gpus gpus ngpus "
    "n_gpus devices num_devices num_nodes nodes nnodes",
    "scale.gpus_per_worker": "gpu use_gpu cuda device accelerator use_cuda",
    "scale.cpus_per_worker": "cpus cpu num_cpus threads num_threads omp_num_threads",
    "scale.max_failures": "retries max_retries max_restarts restarts",
    "scale.collective_timeout_s": "ddp_timeout nccl_timeout dist_timeout",
    "strategy.name": "parallel parallelism distributed ddp fsdp dist_strategy",
    "fsdp.cpu_offload": "offload",
    "parallel.tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "parallel.pipeline": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
    "precision.dtype": "amp mixed_precision fp16 bf16 fp32 half autocast torch_dtype",
    "activations.checkpointing": "gradient_checkpointing activation_checkpointing grad_checkpointing recompute",
    "compilation.what": "compile torch_compile use_compile",
    "data.readers": "dataloader_num_workers loader_workers data_workers reader",
    "data.prefetch_mib": "prefetch prefetch_factor",
    "batch.drop_last": "dataloader_drop_last drop_remainder",
    "checkpoint.storage_path": "output_dir out_dir save_dir log_dir logdir default_root_dir checkpoint_dir "
    "checkpoint_path checkpoint_folder",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval checkpoint_every save_strategy",
    "checkpoint.keep_last": "save_total_limit save_top_k num_to_keep",
    "tracking.uri": "mlflow mlflow_uri mlflow_tracking_uri tracking_uri",
    "tracking.experiment": "experiment_name project project_name wandb_project",
    "tracking.every_steps": "log_every log_interval log_steps logging_steps log_every_n_steps",
    "workload.name": "class class_name class_path model module task model_name",
    "workload.args": "model_args kwargs hparams hyperparameters model_kwargs",
    "fine_tuning.lora_rank": "lora lora_r r rank_lora",
    "seed": "random_seed manual_seed rng_seed random_state",
    "deterministic": "use_deterministic_algorithms cudnn_deterministic full_determinism",
    "memory.find_micro_size": "auto_find_batch_size",
    "data.bucket_by_length": "group_by_length",
}
"""Words of other libraries, by the equivalent key."""
NOTES: dict[str, str] = {
    "stop.after": "with its unit, as in '3 epochs' or '500 steps'",
    "schedule.warmup": "with its unit, as in '1 epoch' or '500 steps'",
    "evaluation.every": "with its unit, as in '1 epoch' or '500 steps'",
    "checkpoint.every": "with its unit, as in '1 epoch' or '500 steps'",
    "batch.global_size": "samples of one step over all workers",
    "batch.micro_size": "accumulation follows from it, batch.global_size and scale.workers",
    "scale.workers": "one per GPU, each with scale.gpus_per_worker; data.readers sets the reader of the rows",
    "schedule.final_ratio": "as a share of the learning rate",
    "strategy.name": "ddp, fsdp and others by name",
    "precision.dtype": "fp32, bf16 or fp16",
}
"""Further differences from libraries that use the word, by key."""
KEYS: dict[str, str] = {word: key for key, words in WORDS.items() for word in words.split()}


def meant_by(word: str) -> str | None:
    """Return the key for a word of other libraries, if any. word: without its section, in any case, with - or _."""
    return KEYS.get(word.lower().replace("-", "_"))
