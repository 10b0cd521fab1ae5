"""PyTorch's own operator tests (the OpInfo database) on the device, against the CPU.

    python script/opinfo.py --families pointwise,reduction --out report.md
    python script/opinfo.py --op 'nn.functional.gelu' --samples 100

Every operator runs in a worker process, so a crash or a hang costs one operator. Random and uninitialised results are
compared in shape and dtype only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

# Forward tolerances (relative, absolute) per dtype; a gradient, which adds up more terms, is allowed ten times as much.
TOLERANCES = {"float16": (2e-3, 2e-3), "bfloat16": (1.6e-2, 1e-2), "float32": (2e-5, 1e-5), "float64": (1e-7, 1e-7),
              "complex64": (2e-5, 1e-5), "complex128": (1e-7, 1e-7)}
GRADIENT_DTYPES = ("float32", "bfloat16")

POINTWISE = r"""where|clamp(_min|_max)?|lerp|addcmul|addcdiv|isin|complex|polar|frexp|nan_to_num|mvlgamma|polygamma|sgn|
  threshold|masked_fill|item|fill|zero_|full_like|full|ones|zeros|ones_like|zeros_like|eye|arange|linspace|logspace|
  tril|
  triu|tril_indices|triu_indices|nn\.functional\.(relu|relu6|silu|gelu|glu|mish|elu|selu|celu|hard\w+|leaky_relu|
  logsigmoid|prelu|rrelu|soft\w+|tanhshrink|threshold|\w*loss|binary_cross_entropy\w*|kl_div|cross_entropy|dropout\w*|
  alpha_dropout|feature_alpha_dropout)|softmax|log_softmax|_softmax_backward_data|masked\.\w*softm\w+|special\..*|
  bernoulli|multinomial|normal|uniform|cauchy|exponential|geometric|log_normal|rand\w*|isclose|allclose|equal|
  float_power|rsub|__r(?!matmul)\w+__|to|clone|copy|double|float|half|bfloat16|int|long|short|char|byte|bool|cfloat|
  cdouble|chalf|conj|conj_physical|real|imag|resolve_conj|resolve_neg"""
REDUCTION = r"""sum|nansum|mean|prod|var\w*|std\w*|norm|linalg\.vector_norm|amax|amin|aminmax|max|min|median|nanmedian|
  mode|kthvalue|arg\w+|any|all|count_nonzero|logsumexp|cum\w+|logcumsumexp|cumulative_trapezoid|trapezoid|trapz|histc|
  histogram\w*|bincount|unique\w*|searchsorted|bucketize|sort|msort|topk|dist|quantile|nanquantile|masked\.\w+|
  _upsample_none|sum_to_size|corrcoef|cov|diff|trace|hash_tensor"""
VIEW = r"""view\w*|reshape\w*|permute\w*|transpose\w*|t|t_copy|T|H|mT|mH|squeeze\w*|unsqueeze\w*|expand\w*|
  as_strided\w*|narrow\w*|slice\w*|select\w*|split\w*|chunk|unbind\w*|unfold\w*|diag\w*|flatten|unflatten|ravel|
  movedim|moveaxis|
  swap\w+|
  tensor_split|[hvd]split|[hvd]stack|column_stack|stack|cat|block_diag|roll|flip\w*|rot90|repeat|tile|broadcast_\w+|
  contiguous|alias_copy|detach_copy|meshgrid\w*|atleast_\w+|unsafe_\w+|nn\.functional\.(pad|pixel_\w+|unfold|fold|
  channel_shuffle)|constant_pad_nd|resize\w*|new_\w+|empty\w*|cartesian_prod|combinations|linalg\.diagonal"""
INDEXING = r"""index_\w+|gather|scatter\w*|take\w*|put|masked_(select|scatter)|__getitem__|nonzero\w*|argwhere|
  repeat_interleave|nn\.functional\.(embedding\w*|one_hot)|_unsafe_masked_index\w*|segment_reduce|vander"""
MATMUL = r"""mm|bmm|matmul|addmm\w*|baddbmm|addbmm|addmv|mv|addr|outer|ger|dot|vdot|inner|kron|tensordot|einsum|cross|
  __rmatmul__|cdist|nn\.functional\.(linear|bilinear|conv\w+|scaled_dot_product_attention|multi_head\w+|
  scaled_\w+)|linalg\.(multi_dot|matrix_power|vecdot|cross)|torch\.ops\.aten\._\w+attention\w+|_int_mm|
  nn\.functional\.pdist"""
NORMALIZATION = r"""native_\w*norm|batch_norm\w*|nn\.functional\.(\w*norm|local_response_norm|normalize|\w*pool\w*|
  interpolate|upsample_\w+|grid_sample|affine_grid|cosine_similarity|pairwise_distance)|renorm|_native_\w+|
  grid_sampler\w*|torch\.ops\.aten\._safe_softmax\S*"""
FAMILIES = {name: re.compile("(?:" + re.sub(r"\s+", "", pattern) + r")$") for name, pattern in (
    ("pointwise", POINTWISE), ("reduction", REDUCTION), ("view", VIEW), ("indexing", INDEXING), ("matmul", MATMUL),
    ("normalization", NORMALIZATION))}

RANDOM = re.compile(r"""(empty\w*|new_empty\w*|rand\w*|bernoulli|multinomial|normal|uniform|cauchy|exponential|
  geometric|log_normal|nn\.functional\.(\w*dropout\w*|rrelu|fractional_max_pool\w*)|(torch\.)?pca_lowrank|
  svd_lowrank)$""".replace("\n", "").replace(" ", ""))
# Which of several equal values an index names is not defined: the values are compared, of indices the shape.
TIES = re.compile(r"(m?sort|argsort|topk|kthvalue|mode|(nan)?median|masked\.(nan)?median)$")
# Results defined up to a sign or phase: OpInfo's own reduction to what is unique is compared.
GAUGE = re.compile(r"(linalg\.)?(svd|eigh?|qr|householder_product|lobpcg)$|geqrf$")


def family(op: Any) -> str:
    """The family of an OpInfo: by name, else by OpInfo class."""
    for name, pattern in FAMILIES.items():
        if pattern.match(op.name):
            return name
    kind = {c.__name__ for c in type(op).__mro__}
    if kind & {"UnaryUfuncInfo", "BinaryUfuncInfo"}:
        return "pointwise"
    return "reduction" if "ReductionOpInfo" in kind else "other"


def database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


# ---------------------------------------------------------------------------------------------------- the worker


def _spread(items: list[Any], count: int) -> Iterator[tuple[int, Any]]:
    """At most `count` items, evenly over the list."""
    step = max(1, -(-len(items) // count))
    return ((i, items[i]) for i in range(0, len(items), step))


def _to_device(value: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to("tpu").requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.device) or leaf in ("cpu", "cpu:0"):
            return "tpu"
        return leaf

    return pytree.tree_map(lambda x: move(x) if isinstance(x, torch.Tensor | torch.device | str) else x, value)


def _tensors(value: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _compare(want: Any, got: Any, name: str, scale: float, dtype: str, values: bool, ties: bool = False) -> None:
    import torch
    from torch.utils import _pytree as pytree

    wanted, gotten = pytree.tree_leaves(want), pytree.tree_leaves(got)
    if len(wanted) != len(gotten):
        raise AssertionError(f"{len(gotten)} results instead of {len(wanted)}")
    for w, g in zip(wanted, gotten):
        if not isinstance(w, torch.Tensor):
            if values and w != g and not (w != w and g != g) and not isinstance(w, torch.device):
                raise AssertionError(f"{name}: {g!r} instead of {w!r}")
            continue
        if w.dtype != g.dtype or w.shape != g.shape:
            raise AssertionError(f"{name}: {g.dtype} {tuple(g.shape)} instead of {w.dtype} {tuple(w.shape)}")
        if g.device.type != "tpu":
            raise AssertionError(f"{name}: the result is on {g.device}")
        if values and not (ties and w.dtype == torch.int64 and (len(wanted) == 1 or w is not wanted[0])):
            kind = str(w.dtype).removeprefix("torch.")
            rtol, atol = TOLERANCES.get(kind, (0.0, 0.0))
            if dtype in ("bfloat16", "float16") and kind in TOLERANCES:  # a wider result of narrow inputs
                rtol, atol = max(rtol, TOLERANCES[dtype][0]), max(atol, TOLERANCES[dtype][1])
            torch.testing.assert_close(g.detach().cpu(), w.detach(), rtol=rtol * scale, atol=atol * scale,
                                       equal_nan=True)


def _gradients(op: Any, sample: Any, output: Any, inputs: list[Any]) -> Any:
    import torch

    outputs = [t for t in _tensors(sample.output_process_fn_grad(output)) if t.requires_grad]
    if not outputs:
        return []
    generator = torch.Generator().manual_seed(7)
    weights = []
    for t in outputs:
        weight = torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype)
        weights.append(weight.to(t.device))
    return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)


def _widened(value: Any) -> Any:
    """Narrow tensors as float32 ones that hold the same numbers."""
    import torch
    from torch.utils import _pytree as pytree

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16):
            return leaf.detach().float().requires_grad_(leaf.requires_grad)
        return torch.float32 if leaf in (torch.bfloat16, torch.float16) else leaf

    return pytree.tree_map(lambda x: widen(x) if isinstance(x, torch.Tensor | torch.dtype) else x, value)


def _as_near(want: Any, got: Any, exact: Any) -> bool:
    """Whether a narrow result that differs from the CPU's is as near to the float32 result as the CPU's is."""
    import torch

    for w, g, e in zip(_tensors(want), _tensors(got), _tensors(exact)):
        if w.dtype not in (torch.bfloat16, torch.float16):
            continue
        ours, theirs = (g.detach().cpu().float() - e).abs(), (w.detach().float() - e).abs()
        if ours.numel() and not bool(ours.nan_to_num(0).amax() <= theirs.nan_to_num(0).amax() + 1e-3):
            return False
    return True


def _call(op: Any, sample: Any, place: Any, differentiable: bool) -> tuple[Any, Any]:
    """Results and gradients for a sample whose tensors are mapped by `place`."""
    import torch

    input_, args, kwargs = place(sample.input), place(sample.args), place(sample.kwargs)
    torch.manual_seed(1)
    result = op.op(input_, *args, **kwargs)
    inputs = [t for t in _tensors((input_, args, kwargs)) if t.requires_grad]
    if not differentiable or not inputs:
        return result, None
    return result, lambda: _gradients(op, sample, result, inputs)


def _check_sample(op: Any, sample: Any, dtype: str, differentiable: bool) -> str | None:
    """None when the CPU refuses the sample, "" when device and CPU agree, else the difference."""
    random = RANDOM.match(op.name) is not None or bool(sample.kwargs.get("dropout_p"))
    ties = TIES.match(op.name) is not None
    unique = sample.output_process_fn_grad if GAUGE.match(op.name) else lambda x: x
    try:
        want, gradient = _call(op, sample, lambda x: x, differentiable)
    except Exception:
        return None
    try:
        reference = gradient() if gradient else None
    except Exception:
        reference = None
    stage = "forward"
    try:
        got, far = _call(op, sample, _to_device, differentiable)
        try:
            _compare(unique(want), unique(got), "result", 1.0, dtype, not random,
                     ties and not sample.kwargs.get("stable", False))
        except AssertionError:
            if dtype not in ("bfloat16", "float16") or not _as_near(
                    want, got, _call(op, sample, _widened, False)[0]):
                raise
        if reference is not None:
            stage = "gradient"
            gradients = far() if far else None
            try:
                _compare(reference, gradients, "gradient", 10.0, dtype,
                         not random and not (ties and dtype != "float32"))
            except AssertionError:
                if dtype not in ("bfloat16", "float16") or not _as_near(
                        reference, gradients, _call(op, sample, _widened, True)[1]()):
                    raise
        return ""
    except Exception as error:
        shapes = [tuple(t.shape) for t in _tensors((sample.input, sample.args, sample.kwargs))]
        return (f"{stage}, {shapes} {sample.args if len(str(sample.args)) < 60 else ''}"
                f"{sample.kwargs if len(str(sample.kwargs)) < 80 else ''}: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:260]}")


def check(op: Any, dtype: Any, limit: int) -> dict[str, Any]:
    """Runs an operator's samples in one dtype; returns counts and failures."""
    import torch

    from torch_tpu.eager import execute, fallback

    short = str(dtype).removeprefix("torch.")
    fallback.reset()
    differentiable = (op.supports_autograd and short in GRADIENT_DTYPES
                      and dtype in op.supported_backward_dtypes("cpu"))
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))
    outcomes = [(i, _check_sample(op, sample, short, differentiable)) for i, sample in _spread(samples, limit)]
    outcomes = [(i, text) for i, text in outcomes if text is not None]
    execute.clear()
    failures = [f"sample {i}, {text}" for i, text in outcomes if text]
    return {"dtype": short, "passed": len(outcomes) - len(failures), "total": len(outcomes), "failures": failures,
            "fallbacks": fallback.report()}


def worker(dtypes: list[str], limit: int) -> None:
    """Reads operator numbers, one a line; answers each with one JSON line per dtype and an empty line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with answers
    warnings.simplefilter("ignore")
    import torch

    from torch_tpu.eager import fallback

    torch.set_num_threads(1)
    ops = database()
    fallback.set_mode("silent")
    answers.write("ready\n")
    for line in sys.stdin:
        op = ops[int(line)]
        for name in dtypes:
            dtype = getattr(torch, name)
            if dtype not in op.dtypes:
                continue
            try:
                answers.write(json.dumps(check(op, dtype, limit)) + "\n")
            except Exception as error:
                answers.write(json.dumps({"dtype": name, "passed": 0, "total": 1, "fallbacks": {}, "failures": [
                    f"samples: {type(error).__name__}: {' '.join(str(error).split())[:260]}"]}) + "\n")
        answers.write("\n")


# ---------------------------------------------------------------------------------------------------- the parent


class Worker:
    """A subprocess, and what it is busy with."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", "--dtypes", arguments.dtypes, "--samples",
                   str(arguments.samples)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
        self.op: int | None = None
        self.ready = False
        self.deadline = time.monotonic() + 300
        self.held = b""

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            raise EOFError
        self.held += data
        *whole, self.held = self.held.split(b"\n")
        return iter([line.decode() for line in whole])

    def give(self, op: int, seconds: float) -> None:
        assert self.process.stdin is not None
        self.op, self.deadline = op, time.monotonic() + seconds
        self.process.stdin.write(f"{op}\n".encode())
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run(arguments: argparse.Namespace, todo: list[int], ops: list[Any]) -> dict[int, list[dict[str, Any]]]:
    """Every operator's answers; a worker that dies or overruns is replaced."""
    results: dict[int, list[dict[str, Any]]] = defaultdict(list)
    queue = list(reversed(todo))
    selector = selectors.DefaultSelector()

    def start() -> None:
        fresh = Worker(arguments)
        selector.register(fresh.process.stdout, selectors.EVENT_READ, fresh)

    def end(held: Worker, why: str) -> None:
        selector.unregister(held.process.stdout)
        held.stop()
        if held.op is not None:
            results[held.op].append({"dtype": "-", "passed": 0, "total": 1, "fallbacks": {}, "failures": [why]})
        elif not held.ready:
            raise RuntimeError(f"a worker did not start: {why}")
        if queue:
            start()

    for _ in range(min(arguments.jobs, len(todo))):
        start()
    while selector.get_map():
        for key, _ in selector.select(timeout=1):
            held: Worker = key.data
            try:
                lines = list(held.lines())
            except EOFError:
                end(held, f"crashed with status {held.process.wait()}")
                continue
            for line in lines:
                if line == "ready":
                    held.ready = True
                elif line:
                    results[held.op].append(json.loads(line))
                    continue
                if not line and arguments.verbose:
                    counts = [f"{r['dtype']} {r['passed']}/{r['total']}" for r in results[held.op]]
                    print(f"{ops[held.op].full_name}: {', '.join(counts)}", file=sys.stderr, flush=True)
                held.op = None
                if queue:
                    held.give(queue.pop(), arguments.timeout)
                else:
                    selector.unregister(held.process.stdout)
                    held.stop()
                    break
        for key in list(selector.get_map().values()):
            if time.monotonic() > key.data.deadline:
                end(key.data, f"took longer than {arguments.timeout} s")
    return results


def report(results: dict[int, list[dict[str, Any]]], ops: list[Any], arguments: argparse.Namespace) -> str:
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    failures: list[str] = []
    fallbacks: Counter[str] = Counter()
    for number in sorted(results):
        op = ops[number]
        for answer in results[number]:
            row = table[(family(op), answer["dtype"])]
            if not answer["total"]:
                continue
            row["ops"] += 1
            row["ops passed"] += answer["passed"] == answer["total"]
            row["samples"] += answer["total"]
            row["samples passed"] += answer["passed"]
            row["fallbacks"] += bool(answer["fallbacks"])
            fallbacks.update(answer["fallbacks"])
            failures += [f"- {family(op)} `{op.full_name}` {answer['dtype']}: {f}" for f in answer["failures"]]
    lines = [f"# OpInfo on tpu: at most {arguments.samples} samples an operator and dtype", "",
             "Tolerances (relative, absolute): " + ", ".join(f"{k} {v}" for k, v in TOLERANCES.items())
             + "; gradients 10 times as much; integers and bools exact.", "",
             "| family | dtype | operators passed | samples passed | rate | operators with a CPU fallback |",
             "|---|---|---|---|---|---|"]
    total: Counter[str] = Counter()
    for (name, dtype), row in sorted(table.items()):
        if row["samples"]:
            lines.append(_row(name, dtype, row))
            total.update(row)
    if total["samples"]:
        lines.append(_row("all", "all", total))
    lines += ["", "## Operators that ran on the CPU", ""]
    lines += [f"- {name}: {count} calls" for name, count in fallbacks.most_common()]
    return "\n".join([*lines, "", "## Failures", "", *failures, ""])


def _row(name: str, dtype: str, row: Counter[str]) -> str:
    return (f"| {name} | {dtype} | {row['ops passed']}/{row['ops']} | {row['samples passed']}/{row['samples']} | "
            f"{100 * row['samples passed'] / row['samples']:.2f} % | {row['fallbacks']} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--families", default="all", help=f"comma-separated: {', '.join(FAMILIES)}, other, or all")
    parser.add_argument("--dtypes", default="float32,bfloat16,int64,bool")
    parser.add_argument("--op", help="regular expression over OpInfo names")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--samples", type=int, default=8, help="at most this many an operator and dtype")
    parser.add_argument("--timeout", type=float, default=180, help="seconds an operator may take")
    parser.add_argument("--out", help="write the report here (default: standard output)")
    parser.add_argument("--verbose", action="store_true", help="a line an operator, to standard error")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.dtypes.split(","), arguments.samples)
        return
    warnings.simplefilter("ignore")
    ops = database()
    wanted = set(arguments.families.split(","))
    todo = [i for i, op in enumerate(ops)
            if ("all" in wanted or family(op) in wanted)
            and (arguments.op is None or re.search(arguments.op, op.full_name))]
    if not todo:
        parser.error("no operator matches")
    text = report(run(arguments, todo, ops), ops, arguments)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(text)
        print(text.split("## Operators")[0])
    else:
        print(text)


if __name__ == "__main__":
    main()
