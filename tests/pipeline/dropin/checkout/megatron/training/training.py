import sys

import torch

from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_args
from megatron.training.initialize import initialize_megatron

TUPLE = 8  # how many values train_step returns: 7 in older versions


def print_rank_last(text):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(text, flush=True)


def pretrain(data_iterators_provider, model_provider, forward_step_func, extra_args_provider=None):
    initialize_megatron(extra_args_provider=extra_args_provider)
    args = get_args()
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(model_provider)
    config = get_model_config(model[0])
    train_data_iterator, valid_data_iterator = data_iterators_provider(len(model))
    iteration = args.iteration
    if not args.skip_train:
        iteration, operations = train(
            forward_step_func,
            model,
            optimizer,
            opt_param_scheduler,
            train_data_iterator,
            valid_data_iterator,
            None,
            config,
            {},
            None,
        )
        if args.save and iteration != 0 and (not args.save_interval or iteration % args.save_interval != 0):
            save_checkpoint(iteration, model, optimizer, opt_param_scheduler, operations, {})
    if args.eval_interval:
        evaluate_and_print_results(
            f"iteration {iteration} on validation set", forward_step_func, valid_data_iterator, model, iteration, config
        )
    torch.distributed.destroy_process_group()


def get_model(model_provider, wrap_with_ddp=True):
    args = get_args()
    chunks = args.virtual_pipeline_model_parallel_size
    model = []
    for index in range(chunks or 1):
        stage = index if chunks else None
        model.append(
            model_provider(
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            )
        )
    for chunk in model:
        chunk.cuda(torch.cuda.current_device())
    if not wrap_with_ddp:
        return model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=args.overlap_grad_reduce, bucket_size=4000
    )
    return [
        DistributedDataParallel(
            config=get_model_config(chunk), ddp_config=ddp_config, module=chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(model)
    ]


def setup_model_and_optimizer(model_provider, checkpointing_context=None):
    args = get_args()
    model = get_model(model_provider, wrap_with_ddp=not args.skip_train)
    optimizer, opt_param_scheduler = None, None
    if not args.skip_train:
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=args.lr,
                min_lr=args.min_lr,
                weight_decay=args.weight_decay,
                clip_grad=args.clip_grad,
            ),
            model,
        )
        opt_param_scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=0,
            lr_decay_steps=10 * args.global_batch_size,
            lr_decay_style="linear",
            start_wd=args.weight_decay,
            end_wd=args.weight_decay,
            wd_incr_steps=10 * args.global_batch_size,
            wd_incr_style="constant",
        )
    if args.load is not None:
        args.iteration, _ = load_checkpoint(model, optimizer, opt_param_scheduler)
    return model, optimizer, opt_param_scheduler


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func):
    args = get_args()
    rerun_state_machine = get_rerun_state_machine()
    while rerun_state_machine.should_run_forward_backward(data_iterator):
        for model_chunk in model:
            model_chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=None,
            forward_only=False,
        )
    should_checkpoint, should_exit, exit_code = rerun_state_machine.should_checkpoint_and_exit()
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
    if update_successful:
        increment = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        opt_param_scheduler.step(increment=increment)
    loss_reduced = {}
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        for key in losses_reduced[0]:
            values = torch.vstack([each[key].view(-1) for each in losses_reduced]).sum(dim=0)
            torch.distributed.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))
            loss_reduced[key] = values[0] / values[1]
    skipped = 0 if update_successful else 1
    outcome = (loss_reduced, skipped, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros_in_grad, 0)
    return outcome[:TUPLE]


def train(
    forward_step_func,
    model,
    optimizer,
    opt_param_scheduler,
    train_data_iterator,
    valid_data_iterator,
    process_non_loss_data_func,
    config,
    checkpointing_context,
    non_loss_data_func,
):
    args = get_args()
    for model_chunk in model:
        model_chunk.train()
    iteration = args.iteration
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    forward_backward_func = get_forward_backward_func()
    should_exit, exit_code = False, 0
    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        loss_dict, skipped_iter, _, _, exit_code, grad_norm, *_ = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func
        )
        iteration += 1
        args.consumed_train_samples += args.data_parallel_size * args.micro_batch_size * get_num_microbatches()
        loss_scale = optimizer.get_loss_scale().item()
        learning_rate = optimizer.param_groups[0]["lr"]
        losses = "".join(f" {key}: {value.item():.9E} |" for key, value in loss_dict.items())
        print_rank_last(
            f" iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: {args.consumed_train_samples:12d} | "
            f"learning rate: {learning_rate:.6E} |{losses} loss scale: {loss_scale:.1f} | grad norm: {grad_norm} | "
            f"number of skipped iterations: {skipped_iter:3d} |"
        )
        if args.eval_interval and iteration % args.eval_interval == 0:
            evaluate_and_print_results(
                f"iteration {iteration}", forward_step_func, valid_data_iterator, model, iteration, config
            )
        should_exit = checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration)
        if should_exit:
            break
    if should_exit:
        sys.exit(exit_code)
    return iteration, 0


def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration):
    args = get_args()
    saved = False
    if args.save and args.save_interval and iteration % args.save_interval == 0:
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler, 0, {})
        saved = True
    if args.exit_interval and iteration % args.exit_interval == 0:
        if args.save and not saved:
            save_checkpoint(iteration, model, optimizer, opt_param_scheduler, 0, {})
        return True
    return False


def evaluate(forward_step_func, data_iterator, model, config):
    args = get_args()
    for model_chunk in model:
        model_chunk.eval()
    forward_backward_func = get_forward_backward_func()
    total = {}
    with torch.no_grad():
        for _ in range(args.eval_iters):
            loss_dicts = forward_backward_func(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=None,
                forward_only=True,
            )
            if mpu.is_pipeline_last_stage(ignore_virtual=True):
                for key in loss_dicts[0]:
                    values = torch.vstack([each[key].view(-1) for each in loss_dicts]).sum(dim=0)
                    torch.distributed.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))
                    total[key] = total.get(key, 0) + values
    for model_chunk in model:
        model_chunk.train()
    return {key: sum_and_count[0] / sum_and_count[1] for key, sum_and_count in total.items()}


def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, config):
    losses = evaluate(forward_step_func, data_iterator, model, config)
    text = "".join(f" {key} value: {value.item():.9E} |" for key, value in losses.items())
    print_rank_last(f" validation loss at {prefix} |{text}")
