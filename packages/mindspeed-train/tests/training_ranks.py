"""What ranks do in the tests of the trainer. A module of its own, so that rank processes can import it."""

import dataclasses
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from mindspeed_parallel.megatron import moe
from mindspeed_parallel.megatron.attention import LatentAttention
from mindspeed_runtime.data.batch import IGNORE, Batch
from mindspeed_runtime.data.loader import Loader
from mindspeed_train.observe import observe_session
from mindspeed_train.optimizer import optimizer_tensors
from mindspeed_train.rank import data_of
from mindspeed_train.session import open_session


def without_norm_reduction(rank, recipe, folder):
    """Norm gradients are not summed over tensor ranks."""
    name = "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"
    with mock.patch(name), open_session(rank, recipe, reference=True) as session:
        return observe_session(session, recipe, folder)


def without_data_reduction(rank, recipe, folder):
    """Gradients are not summed over data ranks."""
    with (
        mock.patch.object(DistributedDataParallel, "finish_grad_sync"),
        open_session(rank, recipe, reference=True) as session,
    ):
        return observe_session(session, recipe, folder)


def with_marks_of_megatron(rank, recipe, folder):
    """Experts are marked as megatron-core's own are: their gradients are theirs alone only where they are dealt out."""
    original = moe._of_experts

    def marked(*shape, **options):
        weight = original(*shape, **options)
        weight.allreduce = recipe.parallel.expert == 1
        return weight

    with (
        mock.patch.object(moe, "_of_experts", marked),
        open_session(rank, recipe, reference=True) as session,
    ):
        return observe_session(session, recipe, folder)


def with_shared_keys_of_each_rank(rank, recipe, folder):
    """Each tensor rank keeps the gradient that its own heads give the keys that all share, and no other."""

    def gathered(self, x):
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=self.tp_group)

    with (
        mock.patch.object(LatentAttention, "_on_all_heads", gathered),
        open_session(rank, recipe, reference=True) as session,
    ):
        return observe_session(session, recipe, folder)


def with_a_batch_twice(rank, recipe, folder):
    """Where the data is cut, one micro-batch takes the place of another."""
    original = Loader.step

    def step(self, n):
        batches = original(self, n)
        return [batches[0], batches[0], *batches[2:]] if self.cut.data_size > 1 else batches

    with mock.patch.object(Loader, "step", step), open_session(rank, recipe, reference=True) as session:
        return observe_session(session, recipe, folder)


def beside_transformers(rank, recipe, folder, steps):
    """Losses of our training and of plain PyTorch training of the transformers model, on the same batches."""
    from transformers import AutoModelForCausalLM

    with open_session(rank, recipe) as session:
        data = data_of(recipe, session, folder)
        options = recipe.optimizer
        hf = AutoModelForCausalLM.from_pretrained(recipe.model.path, attn_implementation="eager", dtype=torch.float32)
        theirs = torch.optim.AdamW(
            hf.parameters(), lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps,
            weight_decay=options.weight_decay,
        )  # fmt: skip
        losses = []
        for step in range(steps):
            batches = data.train.step(step)
            ours = session.engine.train_step(step, batches, options.lr).loss
            count = sum(batch.num_trained for batch in batches)
            theirs.zero_grad()
            total = 0.0
            for batch in batches:
                logits = hf(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
                )
                (loss / count).backward()
                total += float(loss) / count
            theirs.step()
            losses.append((ours, total))
        return losses


def measured(rank, recipe, folder):
    """Bytes of weights, gradients and optimizer state that this rank holds after a step."""
    with open_session(rank, recipe) as session:
        engine = session.engine
        engine.train_step(0, data_of(recipe, session, folder).train.step(0), 1e-4)
        sharded = recipe.megatron.distributed_optimizer
        parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
        buffers = [b for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        held = {p.untyped_storage().data_ptr(): p for p in parameters}
        states = {}
        for tensor in optimizer_tensors(engine.optimizer):
            # Views of the weights and step counters are not what is planned.
            if tensor.dim() and tensor.untyped_storage().data_ptr() not in held:
                states[id(tensor)] = tensor.nbytes
        weights = sum(buffer.param_data.nbytes for buffer in buffers) if sharded else sum(p.nbytes for p in parameters)
        return weights, sum(buffer.grad_data.nbytes for buffer in buffers), sum(states.values())


def steps_and_save(rank, recipe, folder, steps, checkpoint):
    """Take ``steps`` steps and save."""
    with open_session(rank, recipe) as session:
        data = data_of(recipe, session, folder)
        losses = [session.engine.train_step(n, data.train.step(n), recipe.optimizer.lr).loss for n in range(steps)]
        if checkpoint is not None:
            if rank.is_main:
                checkpoint.mkdir()
            session.engine.share(None)
            session.engine.save(checkpoint)
        return losses


def load_and_step(rank, recipe, folder, first, last, checkpoint):
    """Take up a checkpoint and take the steps ``first`` to ``last``."""
    with open_session(rank, recipe) as session:
        data = data_of(recipe, session, folder)
        session.engine.load(checkpoint)
        return [session.engine.train_step(n, data.train.step(n), recipe.optimizer.lr).loss for n in range(first, last)]


def with_poison(rank, recipe, folder, value, who):
    """One step, then a step in which one rank's gradient is not finite, then a step; what changed in each."""
    with open_session(rank, recipe) as session:
        engine, data = session.engine, data_of(recipe, session, folder)
        results = [engine.train_step(0, data.train.step(0), 1e-3)]
        before = _state(engine)
        original = engine.forward_backward

        def poisoned(step, batches):
            original(step, batches)
            if rank.rank == who:
                next(iter(engine.chunks[0].parameters())).main_grad.view(-1)[3] = value

        with mock.patch.object(engine, "forward_backward", poisoned):
            results.append(engine.train_step(1, data.train.step(1), 1e-3))
        unchanged = all(torch.equal(a, b) for a, b in zip(before, _state(engine), strict=True))
        results.append(engine.train_step(2, data.train.step(2), 1e-3))
        changed = any(not torch.equal(a, b) for a, b in zip(before, _state(engine), strict=True))
        return [result.skipped for result in results], unchanged, changed


def _state(engine):
    weights = [p.detach().clone() for chunk in engine.chunks for p in chunk.parameters()]
    return weights + [tensor.detach().clone() for tensor in optimizer_tensors(engine.optimizer)]


def with_an_empty_batch(rank, recipe, folder):
    """Gradients of a global batch, and of the same with a micro-batch that has no label."""
    with open_session(rank, recipe, reference=True) as session:
        engine = session.engine
        batches = data_of(recipe, session, folder).train.step(0)
        empty = dataclasses.replace(batches[0], labels=torch.full_like(batches[0].labels, IGNORE))
        found = []
        for case in (batches, [*batches, empty], [empty, empty]):
            engine.forward_backward(0, case)
            found.append([p.main_grad.clone() for chunk in engine.chunks for p in chunk.parameters()])
        same = max(float((a - b).abs().max()) for a, b in zip(found[0], found[1], strict=True))
        zero = max(float(a.abs().max()) for a in found[2])
        return same, zero, float(max(a.abs().max() for a in found[0]))


def vocabulary(rank, recipe, folder, true):
    """What padded rows do: their probability, their gradient, and their number in a saved checkpoint."""
    with open_session(rank, recipe, reference=True) as session:
        engine = session.engine
        batch = data_of(recipe, session, folder).train.step(0)[0]
        losses = engine.token_losses(batch)
        logits = engine.logits(batch.tokens)
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="none"
        )
        return logits.shape[-1], float((losses.flatten() - expected).abs().max())


def one_loss(rank, recipe, folder):
    """Loss of the first step, in the reference mode."""
    with open_session(rank, recipe, reference=True) as session:
        batches = data_of(recipe, session, folder).train.step(0)
        return session.engine.train_step(0, batches, 1e-3).loss, batches[0].tokens.shape[1]


def rotary_dtype(rank, recipe):
    """Dtypes of the rotary frequencies and of the weights of a bf16 model."""
    with open_session(rank, recipe) as session:
        chunk = session.model.chunks[0].module
        return str(chunk.rotary_pos_emb.inverse_frequencies.dtype), {str(p.dtype) for p in chunk.parameters()}


def first_gradients(rank, recipe, folder):
    """The loss of freshly drawn weights, and the parameters whose first gradient is nothing or not finite."""
    with open_session(rank, recipe, reference=True) as session:
        engine = session.engine
        engine.forward_backward(0, data_of(recipe, session, folder).train.step(0))
        named = [item for chunk in engine.chunks for item in chunk.named_parameters()]
        dead = [name for name, p in named if not 0 < float(p.main_grad.abs().max()) < float("inf")]
        return engine._loss_sum / engine._num_trained, dead


def packed_leak(rank, recipe):
    """Largest change in the second document's losses when a token of the first changes; and of both when they are alone."""
    with open_session(rank, recipe, reference=True) as session:
        engine = session.engine
        tokens = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(1))
        positions = torch.cat((torch.arange(10), torch.arange(14)))[None]
        documents = torch.tensor([[1] * 10 + [2] * 14], dtype=torch.int32)
        first = Batch(tokens[:, :10], tokens[:, :10], torch.arange(10)[None], None)
        second = Batch(tokens[:, 10:], tokens[:, 10:], torch.arange(14)[None], None)
        together = Batch(tokens, tokens, positions, documents)
        changed = dataclasses.replace(together, tokens=tokens.clone())
        changed.tokens[0, 4] += 1
        whole = engine.token_losses(together)
        base = whole[:, 10:]
        leak = float((engine.token_losses(changed)[:, 10:] - base).abs().max())
        open_gate = dataclasses.replace(changed, documents=None)
        leaks = float((engine.token_losses(open_gate)[:, 10:] - base).abs().max())
        alone = torch.cat((engine.token_losses(first), engine.token_losses(second)), dim=1)
        apart = float((alone - whole).abs().max())
        return leak, leaks, apart
