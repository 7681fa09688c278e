"""Faults in the package, each of which is planted in a copy and must be found by the named tests.

``make planted-faults`` plants one after another, and fails if one is not found. A change that moves or rewrites a line
of this list must update the list.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    """A fault: text that occurs once in a file of the package, its replacement, and the tests that should fail."""

    file: str
    text: str
    planted: str
    tests: str


FAULTS = (
    Fault(
        "api/context_manager.py",
        "    if settings.options.num_processes not in (None, 1):",
        "    if settings.options.num_processes not in (None, 1, 2):",
        "tests/api/test_context_manager.py",
    ),
    Fault(
        "api/decorator.py",
        "        run.apply(self._parts)\n        return self._function",
        "        return self._function",
        "tests/api/test_decorator.py",
    ),
    Fault(
        "autotune/race.py",
        "self._settled.get(kind) or self._guessed.get(kind)",
        "self._settled.get(kind)",
        "tests/autotune",
    ),
    Fault(
        "autotune/tuner.py",
        "        if clock.steps < 2 or not self._measures or not clock.is_here:\n",
        "        if clock.steps < 2 or not self._measures:\n",
        "tests/autotune/test_budget.py",
    ),
    Fault(
        "cli/doctor_checks.py",
        "            for instruction_set, words in _WORDS_FOR.items()\n",
        "            for instruction_set, words in [*_WORDS_FOR.items()][:2]\n",
        "tests/cli/test_doctor_checks.py",
    ),
    Fault(
        "cli/script.py",
        "    return click.exceptions.Exit(code if code > 0 else 128 - code)",
        "    return click.exceptions.Exit(code)",
        "tests/cli",
    ),
    Fault(
        "cli/script.py",
        "place += 1 + (args[place] in with_values)",
        "place += 1",
        "tests/cli/test_run.py",
    ),
    Fault(
        "steps/compile.py",
        "    return len(list(module.modules())) > 2 and",
        "    return",
        "tests/steps/test_blocks.py",
    ),
    Fault(
        "config/environment.py",
        '        return text == "1"',
        '        return text == "0"',
        "tests/config/test_options.py",
    ),
    Fault(
        "config/options.py", 'not in (exact, "auto")', "not in (exact, values[name])", "tests/config/test_options.py"
    ),
    Fault("config/precisions.py", '"bf16": "bf16-mixed"', '"bf16": "bf16-true"', "tests/config/test_options.py"),
    Fault(
        "cpu/cgroup.py",
        "    return min((quota for quota in quotas",
        "    return max((quota for quota in quotas",
        "tests/cpu",
    ),
    Fault(
        "cpu/partition.py",
        "None if machine.quota is None else machine.quota / num_processes",
        "machine.quota",
        "tests/cpu/test_partition.py",
    ),
    Fault(
        "data/whole_batches.py",
        " or not _only_indexes(function.__code__)",
        "",
        "tests/steps/test_fast_fetch.py",
    ),
    Fault(
        "data/whole_batches.py",
        "def indexed_sample(",
        '@__import__("functools").cache\ndef indexed_sample(',
        "tests/loops/test_changes.py",
    ),
    Fault(
        "kernels/activations.py",
        'kwargs.get("approximate", "none")',
        'kwargs.get("approximate", "tanh")',
        "tests/kernels/test_activations.py",
    ),
    Fault(
        "kernels/embedding.py",
        "torch.ops.aten.embedding(weight, indices)",
        "weight.index_select(0, indices.reshape(-1)).view(*indices.shape, -1)",
        "tests/loops/test_changes.py tests/loops/test_embeddings.py",
    ),
    Fault(
        "kernels/embedding.py",
        "indices.to(torch.int64), None, ctx.padding",
        "indices.to(torch.int64), None, -1",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "kernels/embedding.py",
        " or not all(map(_State.is_in, self._states, states))",
        "",
        "tests/loops/test_embeddings.py",
    ),
    Fault("kernels/override.py", ".half().float()", "", "tests/steps/test_products.py"),
    Fault(
        "kernels/linear/fp32_product.py",
        "*a.stride(), *b.stride()",
        "*a.stride(), *torch.empty(b.shape[::-1]).t().stride()",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "kernels/head/cross_entropy.py",
        "if weight is not None or not 0",
        "if not 0",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "kernels/norm/norms.py",
        "        form = NHWC[x.dim()]",
        "        form = torch.contiguous_format",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "kernels/norm/norms.py",
        "weight, bias, float(eps), out, means, inverses)",
        "weight, bias, 1e-5, out, means, inverses)",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "kernels/norm/rms_norm.py",
        "weight, [*shape], float(eps))",
        "weight, [*shape], 1e-5)",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "kernels/rnn/rnn.py",
        "outputs, call.dropout, True)",
        "outputs, 0.1, True)",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "optimizers/direct_steps.py",
        "settings = {name: group[name]",
        "settings = {name: optimizer.defaults[name]",
        "tests/loops/test_changes.py",
    ),
    Fault(
        "data/whole_batches.py",
        "_array([dataset.indices[position] for position in positions.tolist()])",
        "positions",
        "tests/steps/test_fast_fetch.py",
    ),
    Fault(
        "distributed/comm/packing.py",
        "slice(start, start + part))\n",
        "slice(0, part))\n",
        "tests/distributed/shared_memory/test_transport.py",
    ),
    Fault(
        "distributed/comm/rank_slot.py",
        "    return given_shares(machine, [chosen[rank] for rank in ranks])",
        "    return given_shares(machine, chosen[: len(ranks)])",
        "tests/distributed/test_rank_slot.py",
    ),
    Fault(
        "distributed/comm/process_group_channel.py",
        "        if len(long) == 1:",
        "        if long:",
        "tests/distributed/shared_memory/test_shared_channel.py",
    ),
    Fault(
        "distributed/shared_memory/shared_ring.py",
        "        self._turn = 1 - self._turn\n        short = None",
        "        self._turn = self._turn if tensors is None else 1 - self._turn\n        short = None",
        "tests/distributed/split_batches/test_loops.py",
    ),
    Fault(
        "distributed/data_parallel/combining_operators.py",
        "    if all(one % rows.dim() for one in dimensions):\n",
        "    if all(one % rows.dim() for one in dimensions[1:]):\n",
        "tests/distributed/data_parallel/test_combining_operators.py",
    ),
    Fault(
        "optimizers/split.py",
        "        for end in [*self.ends]:\n            end()\n",
        "        self.ends.clear()\n",
        "tests/steps/test_optimizer_state.py",
    ),
    Fault(
        "distributed/data_parallel/sample_weights.py",
        "if self._has_warned or not (differ or new):",
        "if self._has_warned or not new:",
        "tests/distributed/data_parallel/test_sample_weights.py",
    ),
    Fault(
        "distributed/data_parallel/sample_weights.py",
        "if self._has_warned or not (differ or new):",
        "if self._has_warned or not differ:",
        "tests/distributed/data_parallel/test_sample_weights.py",
    ),
    Fault(
        "kernels/head/functions.py",
        "kind, before = LogLikelihood, before.before",
        "before = before.before",
        "tests/kernels/test_head.py",
    ),
    Fault(
        "distributed/data_parallel/agreement.py",
        "        if any(norm for _, norm in gradients):",
        "        if True:",
        "tests/distributed/data_parallel/test_agreement.py",
    ),
    Fault(
        "distributed/data_parallel/sync_batch_norm.py",
        "(differences + counts * apart.square())",
        "differences",
        "tests/distributed/data_parallel/test_sync_batch_norm.py",
    ),
    Fault(
        "distributed/data_parallel/comparison.py",
        '"sum" if is_sum else "mean"',
        '"mean"',
        "tests/distributed/split_batches/test_witness.py",
    ),
    Fault(
        "distributed/data_parallel/comparison.py",
        "wrong = differences.wrong_layer([id(one) for _, one in named], self._last_layers, self._earlier)",
        "wrong = []",
        "tests/distributed/split_batches/test_witness.py",
    ),
    Fault(
        "kernels/narrow_copies.py",
        "return None if known is None or known.version != version(tensor) else known.values()",
        "return None if known is None else known.values()",
        "tests/kernels/test_narrow_copies.py",
    ),
    Fault(
        "distributed/data_parallel/gradients.py",
        "values = torch.cat([gradient.values() for gradient in parts]) / ranks.size",
        "values = torch.cat([gradient.values() for gradient in parts])",
        "tests/distributed/data_parallel",
    ),
    Fault(
        "distributed/files/overlay.py",
        "        if whiteout is not None and (status is None or _identity(status) == whiteout):",
        "        if whiteout is not None:",
        "tests/distributed/files/test_redirection.py",
    ),
    Fault(
        "distributed/files/overlay.py",
        "        return whiteout is not None or self._is_new(status)",
        "        return whiteout is not None",
        "tests/distributed/files/test_redirection.py tests/distributed/files/test_writers.py",
    ),
    Fault(
        "distributed/files/functions.py",
        "            return original_os.open(overlay.new(key), flags | os.O_CREAT, S_IMODE(status.st_mode))",
        "            return original_os.open(key, flags | os.O_CREAT, S_IMODE(status.st_mode))",
        "tests/distributed/files/test_writers.py",
    ),
    Fault(
        "distributed/files/shards.py",
        "        return status is None or self.own(key, status) or status",
        "        return status is not None or status is None or status",
        "tests/distributed/files/test_shards.py",
    ),
    Fault(
        "distributed/launch/ending.py",
        "    if failure is not None and failure.kind <= Kind.LATE:",
        "    if False:",
        "tests/distributed/launch/test_workers.py",
    ),
    Fault(
        "distributed/launch/failure.py",
        "    if isinstance(error, RankLeftError):\n        return Kind.LEFT\n",
        "",
        "tests/distributed/launch tests/distributed/test_ranks.py",
    ),
    Fault(
        "distributed/launch/stream.py",
        "            if len(self._received) < after:\n                return\n",
        "",
        "tests/distributed/launch/test_stream.py",
    ),
    Fault(
        "distributed/launch/interrupts.py",
        "            if is_echo or len(self._held) == 1:\n",
        "            if is_echo:\n",
        "tests/distributed/launch_local/test_interrupts.py tests/distributed/launch_local/test_interrupted_launch.py",
    ),
    Fault(
        "distributed/launch/workers.py",
        "max(_GRACE, self.latest_news) if failure.kind is Kind.ECHO else _GRACE",
        "_GRACE",
        "tests/distributed/launch/test_workers.py",
    ),
    Fault(
        "distributed/launch_external/environment.py",
        "            return launch if launch.size > 1 else None\n",
        "            return launch\n",
        "tests/distributed/launch_external tests/distributed/test_rank_slot.py",
    ),
    Fault(
        "distributed/data_parallel/buckets.py",
        "            divide(bucket, self._ranks.size)\n",
        "            divide(bucket, 2)\n",
        "tests/distributed/shared_memory/test_transport.py",
    ),
    Fault(
        "distributed/payload/reached_modules.py",
        "        return not codes <= {*code_in(",
        "        return not codes <= codes | {*code_in(",
        "tests/distributed/payload",
    ),
    Fault(
        "distributed/payload/places.py",
        "        base.clear(value)\n",
        "        pass\n",
        "tests/distributed/payload",
    ),
    Fault(
        "distributed/payload/faithful_pickler.py",
        '        kept["grad"] = tensor.grad\n',
        "        pass\n",
        "tests/distributed/payload",
    ),
    Fault(
        "distributed/sharding/sharding.py",
        "not torch.is_grad_enabled() or self._evaluating\n",
        "self._evaluating\n",
        "tests/distributed/sharding",
    ),
    Fault(
        "distributed/sharding/own_shares.py",
        "self.apart = len({one[:3] for one in by_rank}) > 1\n",
        "self.apart = len({one[1] for one in by_rank}) > 1\n",
        "tests/distributed/sharding",
    ),
    Fault(
        "data/random_states.py",
        "repr([numbers, rank])",
        "repr([process_states(), numbers, rank])",
        "tests/data",
    ),
    Fault(
        "data/images/store.py",
        "    if check and zlib.crc32(rest) != total:\n        return None\n",
        "",
        "tests/data/images/test_store.py",
    ),
    Fault(
        "integrations/cuda_calls.py",
        '    "device_count": lambda: 1,',
        '    "device_count": lambda: 0,',
        "tests/integrations/test_cuda_calls.py",
    ),
    Fault(
        "integrations/fabric.py",
        '(torch, "compile")',
        '(torch, "__doc__")',
        "tests/integrations/test_fabric.py tests/test_import.py",
    ),
    Fault(
        "integrations/lightning/strategy.py",
        "list(self.optimizers) if fitting else []",
        "list(self.optimizers)",
        "tests/integrations/lightning/test_lightning.py",
    ),
    Fault(
        "kernels/csrc/activations.c",
        "(1.59576912160573f + 0.2140644488178f * x * x)",
        "(1.59576912160573f + 0.0713548162726f * x * x)",
        "tests/kernels/test_activations.py",
    ),
    Fault(
        "kernels/csrc/norms.c",
        "second[c] / (elements - 1)",
        "second[c] / elements",
        "tests/kernels/test_exactness.py",
    ),
    Fault(
        "kernels/csrc/cross_entropy.c",
        "if (smoothing) losses[i] +=",
        "if (smoothing) losses[i] -=",
        "tests/kernels/test_exactness.py",
    ),
    Fault(
        "kernels/override.py",
        "if algorithm.kernel is not None and algorithm.kernel not in rules.kernels:",
        "if False:",
        "tests/steps/kernels/test_training.py",
    ),
    Fault(
        "kernels/override.py",
        "None if call is None or call.tensors[0] is None else",
        "None if call is None else",
        "tests/kernels/test_writes.py",
    ),
    Fault(
        "kernels/embedding.py",
        " and not has_lone_storage(returned):",
        " and False:",
        "tests/loops/test_embeddings.py",
    ),
    Fault(
        "kernels/embedding.py",
        "return is_unwritten(tensor) and address_of",
        "return address_of",
        "tests/loops/test_embeddings.py",
    ),
    Fault(
        "kernels/norm/norms.py",
        "running.clone()",
        "running",
        "tests/steps/test_tune_operators.py",
    ),
    Fault(
        "kernels/memory.py",
        "(self.layout == CONTIGUOUS and not tensor.is_contiguous())",
        "False",
        "tests/kernels/test_memory.py",
    ),
    Fault(
        "optim.py",
        "                    count += 1\n",
        "",
        "tests/test_optim.py",
    ),
    Fault(
        "optimizers/torch_fused_steps.py",
        "if tensors is not parameters and [*map(_SIZE, tensors)] != shapes:",
        "if False:",
        "tests/optimizers/test_torch_fused_steps.py",
    ),
    Fault(
        "optimizers/torch_fused_steps.py",
        "parameter.is_cpu and is_dense(parameter)",
        "parameter.is_cpu",
        "tests/optimizers/test_torch_fused_steps.py",
    ),
    Fault(
        "optimizers/torch_fused_steps.py",
        "            increment_version([*chain(parameters, *of_parameters[2:])])\n",
        "",
        "tests/optimizers/test_torch_fused_steps.py",
    ),
    Fault(
        "optimizers/direct_steps.py",
        "        increment_version(written)\n",
        "",
        "tests/optimizers/test_torch_fused_steps.py",
    ),
    Fault(
        "optimizers/direct_steps.py",
        "            denormals.restore(threads)\n",
        "            pass\n",
        "tests/optimizers/test_torch_fused_steps.py",
    ),
    Fault(
        "optimizers/direct_steps.py",
        "            foreach_increment(counters)\n",
        "            pass\n",
        "tests/optimizers/test_torch_fused_steps.py",
    ),
    Fault(
        "patching/weight_copies.py",
        "        return is_unwritten(weight) and",
        "        return",
        "tests/patching/test_weight_copies.py",
    ),
    Fault(
        "patching/attributes.py",
        "            delattr(self.owner, self.name)\n",
        "            pass\n",
        "tests/patching/test_attributes.py",
    ),
    Fault(
        "patching/calls/calls.py",
        "rules = self.rules if of_node is None or of_node.owner != self.rules.owner else of_node",
        "rules = self.rules",
        "tests/autotune/test_operators.py",
    ),
    Fault(
        "patching/calls/calls.py",
        "not (module.training and torch.is_grad_enabled())",
        "not module.training",
        "tests/runtime/test_ambient.py",
    ),
    Fault(
        "patching/calls/calls.py",
        "        _interceptors.pop(key, None)\n        self._modules.pop(key, None)\n",
        "",
        "tests/loops/test_lifetimes.py",
    ),
    Fault(
        "patching/lifetime.py",
        "    undoing.callback(finalizer)\n",
        "",
        "tests/patching/test_lifetime.py",
    ),
    Fault(
        "patching/ownership.py",
        "number < graphs.ends[place]",
        "number <= graphs.ends[place]",
        "tests/patching/test_ownership.py tests/patching/test_operators.py",
    ),
    Fault(
        "patching/patch_table.py",
        "        if not change.users:\n",
        "        if True:\n",
        "tests/patching/test_patch_table.py",
    ),
    Fault(
        "policy/product_precision.py",
        "self._fewest.get(kind, math.inf) for",
        "self._fewest.get(kind, 0) for",
        "tests/policy/test_product_precision.py",
    ),
    Fault(
        "policy/product_precision.py",
        "        self._least = {}\n",
        "        pass\n",
        "tests/policy/test_product_precision.py",
    ),
    Fault(
        "precision/autocast/conversion.py",
        "    tensor.grad = None if gradient is None else gradient.to(dtype)\n",
        "    tensor.grad = gradient\n",
        "tests/steps/test_parameter_dtype.py",
    ),
    Fault(
        "precision/autocast/output_activations.py",
        "connected and noted.still_holds() and",
        "connected and",
        "tests/precision/test_output_activations.py",
    ),
    Fault(
        "precision/autocast/output_activations.py",
        " and not is_seen_by_program(tensor, noted.result)",
        "",
        "tests/precision/test_output_activations.py",
    ),
    Fault(
        "precision/verification/verification.py",
        "bool(far or biased or lost)",
        "bool(far or lost)",
        "tests/api/test_verification.py tests/steps/test_verify.py tests/precision",
    ),
    Fault(
        "profiling/kinds.py",
        "times[PYTHON] += max(wall - sum(times.values()), 0.0)",
        "times[PYTHON] += wall",
        "tests/profiling",
    ),
    Fault(
        "profiling/recorder.py",
        "_events_of_loop(self._profile), wall * 1e6",
        "_events_of_loop(self._profile), wall",
        "tests/cli/test_profile.py",
    ),
    Fault(
        "runtime/ambient.py",
        "            if not self._may_train_more(optimizer):\n",
        "            if True:\n",
        "tests/runtime/test_ambient.py",
    ),
    Fault(
        "runtime/run.py",
        "return STEPS if task is None else task.steps",
        "return STEPS",
        "tests/integrations/lightning/test_trainer.py",
    ),
    Fault(
        "runtime/ambient_training.py",
        "return any(not torch.equal(parameter.detach().to(copy.dtype), copy) for parameter, copy in copies)",
        "return bool(copies)",
        "tests/runtime/test_ambient.py",
    ),
    Fault(
        "runtime/objects/called_functions.py",
        "def _names_in(kind: type, named: _Named) -> frozenset[str]:",
        "@functools.cache\ndef _names_in(kind: type, named: _Named) -> frozenset[str]:",
        "tests/loops/test_lifetimes.py",
    ),
    Fault(
        "runtime/objects/report.py",
        "            self._printed[:] = self._lines\n",
        "            pass\n",
        "tests/runtime/test_report.py tests/api/test_decorator.py",
    ),
    Fault(
        "runtime/run.py",
        "        for step in self._steps:\n            ending.callback(step.undo)\n",
        "        for step in self._steps[1:]:\n            ending.callback(step.undo)\n",
        "tests/runtime/test_run_life.py tests/api/test_verification.py tests/steps/test_verify.py",
    ),
    Fault("steps/allocator.py", "        _set(_LEFT)\n", "        _set(SETTINGS)\n", "tests/steps/test_allocator.py"),
    Fault(
        "runtime/clock.py",
        "        if frame is None or _is_called_by(frame):\n            return\n",
        "        if frame is None:\n            return\n",
        "tests/runtime/test_clock.py",
    ),
    Fault(
        "runtime/settings.py",
        "if ({*written, *options.set_by_environment} - asked_for) & changes.keys()",
        "if ({*written} - asked_for) & changes.keys()",
        "tests/runtime/test_learnt_options.py",
    ),
    Fault(
        "runtime/clock.py",
        "self._next = min((step for step, _ in self._due.values()), default=math.inf)",
        "self._next = math.inf",
        "tests/steps/test_products.py",
    ),
    Fault(
        "runtime/trial.py",
        "        if self.measured or power == self._power:\n",
        "        if self.measured:\n",
        "tests/runtime/test_trial.py",
    ),
    Fault(
        "runtime/trial.py",
        "        self.setting, self._other = self.settings\n",
        "",
        "tests/runtime/test_trial.py",
    ),
    Fault(
        "steps/channels_last.py",
        "shaped(parameters_of(convolution))",
        "[convolution.weight]",
        "tests/steps/test_channels_last.py",
    ),
    Fault(
        "steps/models.py",
        "weights if not has_shape(weight) or weight.numel() >= elements",
        "weights",
        "tests/steps/kernels/test_kernel_step.py",
    ),
    Fault(
        "steps/learning_rate.py",
        "(self._ranks.size - 1) * min(",
        "self._ranks.size * min(",
        "tests/steps/test_learning_rate.py",
    ),
    Fault(
        "steps/step_time.py",
        "optimizer is self._optimizer():",
        "self._optimizer():",
        "tests/steps/test_step_time.py",
    ),
    Fault(
        "integrations/ipex.py",
        "if self.enabled or _MODULE not in sys.modules:",
        "if _MODULE not in sys.modules or self.options:",
        "tests/steps/ipex/test_step.py",
    ),
    Fault(
        "steps/threads.py",
        "self._is_auto or (self._waits is not None and is_busy(self._waits.share()))",
        "self._waits is not None and is_busy(self._waits.share())",
        "tests/steps/test_num_threads.py",
    ),
    Fault(
        "steps/threads.py",
        "            if self._is_auto:\n                self.undoing",
        "            if self._is_auto and self.skip_reason(parts) is None:\n                self.undoing",
        "tests/steps/test_num_threads.py",
    ),
    Fault(
        "steps/threads.py",
        "            torch.set_num_threads(before)\n",
        "            pass\n",
        "tests/steps/test_threads.py",
    ),
)


def is_found(fault: Fault) -> bool:
    """Whether the tests of a fault fail in a copy of the checkout with the fault."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for name in ("nano_loop", "tests", "docs", "scripts", "setup.cfg", "benchmarks", "examples"):
            copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copied(ROOT / name, Path(folder) / name)
        path = Path(folder) / "nano_loop" / fault.file
        path.write_text(path.read_text().replace(fault.text, fault.planted))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=600"]
        environ = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run([*command, *fault.tests.split()], cwd=folder, env=environ, capture_output=True)
    return done.returncode == 1


def main(wanted: list[str]) -> int:
    """Plant the faults of the files whose names contain one of these strings, or all; return the exit status."""
    missed = 0
    for fault in FAULTS:
        if not wanted or any(name in fault.file for name in wanted):
            found = is_found(fault)
            missed += not found
            print(f"{'found ' if found else 'MISSED'}  {fault.file}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
