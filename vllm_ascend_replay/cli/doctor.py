"""`vllm-ascend-replay doctor`: would replay run with these engine arguments, what would it save, and if not, why?

Nothing is started and no weight is read: the configuration is made as a server would make it, and the server's own gate
table judges it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_ascend_replay.cli.options import JsonFile, positive_numbers, wide_console, writable, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_ascend_replay.config import ReplaySettings
    from vllm_ascend_replay.layer_plan import LayerPlan

PLUGIN = "vllm_ascend_replay"
ADDRESS_RANGE = 1 << 32
"""Bytes of one layer's KV cache that Ascend's operators can address: block id x page stride must stay below."""
STREAMS = 1800
"""Streams of an Ascend device that captured pieces may take (a rule of thumb of earlier releases)."""
TESTED = {
    "ascend": "vLLM 0.30.0 with vllm-ascend 0.30.0rc2",
    "reference": "vLLM 0.32.0",
}

TURN_ON: Mapping[str, str] = {
    "model-runner": "VLLM_USE_V2_MODEL_RUNNER=1",
    "pipeline-parallel": "--pipeline-parallel-size 1",
    "decode-context-parallel": "--decode-context-parallel-size 1",
    "prefill-context-parallel": "--prefill-context-parallel-size 1",
    "microbatching": "without --enable-dbo",
    "dp-coordination": "--data-parallel-size 1",
    "lora": "without --enable-lora",
    "prompt-embeds": "without --enable-prompt-embeds",
    "drafter": "without --speculative-config, or with its method ngram (vllm-ascend: also dspark)",
    "pooling": "--runner generate",
    "routed-experts": "without --enable-return-routed-experts",
    "kv-connector": "without --kv-transfer-config",
    "recompute-scheduler": "without recompute_scheduler_enable in --additional-config",
    "prefix-cache": "--no-enable-prefix-caching",
    "mixed-graphs": '--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\'',
    "sharded-model-graphs": '--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\'',
    "unbreakable-graphs": "VLLM_USE_BREAKABLE_CUDAGRAPH=1",
    "eager": "without --enforce-eager",
    "sharded-states": "without sequence parallelism (enable_flashcomm1) and --prefill-context-parallel-size 1",
    "breakable": "VLLM_USE_BREAKABLE_CUDAGRAPH=1",
    "full-graphs": '--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\'',
}
"""By gate: the flag or variable that opens it. Gates that are not here judge the model or the device."""


@dataclass
class Feature:
    """One line of the table."""

    name: str
    on: bool
    reason: str = ""
    """Why it is off, in the words of the server's warning; or what it means to be on."""
    turn_on: str = ""
    """Flags and variables that turn it on."""


@dataclass
class Saving:
    """What one cold prompt saves."""

    tokens: int
    kept_rows: int
    """Rows that the replay layers run, of ``tokens``."""
    skipped_steps: int
    """Chunks in which they do not run at all, where nothing else runs in the data-parallel group."""
    steps: int
    layer_rows: int
    """Rows times layers, all layers."""
    layer_rows_full: int
    """The same without replay."""


@dataclass
class Findings:
    """All that was found; ``reason`` is the first thing that keeps replay from running."""

    versions: dict[str, str | None]
    host: str | None
    device: str
    plugins: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    layer_plan: dict[str, Any] = field(default_factory=dict)
    features: list[Feature] = field(default_factory=list)
    saving: list[Saving] = field(default_factory=list)
    graphs: dict[str, Any] = field(default_factory=dict)
    kv_address: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """What keeps replay from running, the first one being the server's."""

    @property
    def runs(self) -> bool:
        return not self.reasons


# -- the environment ----------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Versions of the installed distributions; ``None``: not installed."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    from vllm_ascend_replay import __version__

    found: dict[str, str | None] = {"vllm-ascend-replay": __version__}
    distributions = packages_distributions()
    for module in ("vllm", "vllm_ascend", "torch", "torch_npu", "triton"):
        # vLLM and Triton come under several distribution names; a module tells which one is there.
        names = distributions.get(module, [])
        found[module.replace("_", "-")] = ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(names)) or None
    try:
        found["triton-ascend"] = version("triton-ascend")
    except PackageNotFoundError:
        found["triton-ascend"] = None
    found["CANN"] = cann_version(os.environ)
    return found


def cann_version(environ: Mapping[str, str]) -> str | None:
    """The version that the CANN toolkit's own files state, found through its environment variables."""
    import re

    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        home = environ.get(variable)
        if not home:
            continue
        for name in ("version.cfg", "version.info", "compiler/version.info", "runtime/version.info"):
            file = Path(home) / name
            if file.is_file():
                match = re.search(
                    r"^\s*\w*version\w*\s*=\s*\[?([^\]\s]+)", file.read_text(errors="replace"), re.I | re.M
                )
                if match:
                    return match.group(1)
        return f"at {variable}, version unknown"
    return None


def device() -> str:
    """The accelerator, in words."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return "unknown: torch is not installed"
    try:
        import torch

        if find_spec("torch_npu") is not None:
            import torch_npu  # noqa: F401
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return "none visible; the checks below need none"
        name = torch.get_device_module(accelerator).get_device_name(0)
        count = torch.accelerator.device_count()
    except Exception as error:  # a broken driver may raise anything
        return f"none usable ({type(error).__name__}: {error})"
    try:
        from vllm_ascend_replay.kernels import num_programs

        cores = f", grids of {num_programs(torch.device(accelerator.type, 0))} programs"
    except Exception as error:
        cores = f", cores unknown ({error})"
    return f"{count} x {name} ({accelerator.type}){cores}"


def plugins() -> tuple[list[str], list[str]]:
    """vLLM's plugins in the order found, and what is wrong with them."""
    from importlib.metadata import entry_points

    allowed = os.environ.get("VLLM_PLUGINS")
    wanted = None if allowed is None else [name.strip() for name in allowed.split(",")]
    lines, general = [], []
    for group in ("vllm.platform_plugins", "vllm.general_plugins"):
        for point in entry_points(group=group):
            loads = wanted is None or point.name in wanted
            lines.append(f"{group}: {point.name}{'' if loads else ' (left out by VLLM_PLUGINS)'}")
            if group == "vllm.general_plugins" and loads:
                general.append(point.name)
    wrong = []
    if PLUGIN not in general:
        if wanted is not None and PLUGIN not in wanted:
            wrong.append(f"VLLM_PLUGINS leaves {PLUGIN} out; add it: VLLM_PLUGINS={','.join([*wanted, PLUGIN])}")
        else:
            wrong.append("the package is not installed: its plugin entry point is missing; pip install it")
    return lines, wrong


# -- the configuration --------------------------------------------------------------------------------------------


@contextmanager
def _quietly() -> Iterator[None]:
    """Errors only are logged: what vLLM tells while it makes a configuration is for a server's log."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def parse_arguments(arguments: Sequence[str]) -> Any:
    """Parse the arguments of ``vllm serve`` with vLLM's own parser.

    Raises:
        SystemExit: arguments that vLLM does not know (its parser says which); status 2.
    """
    from importlib import import_module

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="vllm-ascend-replay doctor", usage="%(prog)s --model DIR [arguments of vllm serve]", add_help=False
    )
    # The server's parser also knows --host, --port and the like; its module has moved between versions.
    for module in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        try:
            parser = import_module(module).make_arg_parser(parser)
            break
        except (ImportError, AttributeError):
            continue
    else:
        parser = AsyncEngineArgs.add_cli_args(parser)
    parsed = parser.parse_args(list(arguments))
    if getattr(parsed, "model_tag", None):
        parsed.model = parsed.model_tag
    return parsed


def engine_config(arguments: Sequence[str]) -> Any:
    """vLLM's configuration of these server arguments, made without a device, weights or an engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(parse_arguments(arguments)).create_engine_config()


def model_json(model: str) -> SimpleNamespace | None:
    """The text part of a model directory's (or file's) ``config.json``; ``None`` if there is no such file.

    Raises:
        ValueError: it is no JSON object.
    """
    path = Path(model)
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        return None
    values = json.loads(file.read_text())
    if not isinstance(values, dict) or not isinstance(values.get("text_config", values), dict):
        raise ValueError("it is no JSON object")
    return SimpleNamespace(**values.get("text_config", values))


def _in_a_line(error: Exception) -> str:
    """An error's kind and what it says first. Pydantic's first line says only how many errors there are."""
    details = getattr(error, "errors", None)
    if callable(details) and details():
        first = details()[0]
        where = ".".join(str(part) for part in first.get("loc", ()))
        return f"{type(error).__name__}: {where + ': ' if where else ''}{first.get('msg', '')}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def layer_plan_words(plan: LayerPlan, settings: ReplaySettings) -> dict[str, Any]:
    """The layer plan, for a person."""
    return {
        "layers": plan.num_layers,
        "cut": plan.cut,
        "replay_layers": f"{plan.cut}-{plan.num_layers - 1}",
        "late_layers": plan.num_late_layers,
        "window": plan.window,
        "kept_rows": settings.keep_last(window=plan.window, num_late_layers=max(plan.num_late_layers, 0)),
    }


def expected_saving(plan: LayerPlan, settings: ReplaySettings, tokens: int, *, chunk: int, align: int = 1) -> Saving:
    """What one cold prompt saves when nothing else runs.

    Args:
        plan: the layers.
        settings: the settings.
        tokens: length of the prompt.
        chunk: tokens of a step.
        align: first kept positions are rounded down to a multiple of this.
    """
    from vllm_ascend_replay.plan import plan_replay

    keep = settings.keep_last(window=plan.window, num_late_layers=max(plan.num_late_layers, 0))
    kept = skipped = steps = 0
    for start in range(0, tokens, chunk):
        step = plan_replay(
            num_computed=[start],
            query_lens=[min(chunk, tokens - start)],
            prefill_lens=[tokens],
            is_prefilling=[True],
            keeps_rows=[False],
            replay_start=[0],
            window=plan.window,
            keep_last=keep,
            policy=settings.policy,
            min_saved=settings.min_saved,
            align=align,
        )
        steps += 1
        kept += step.num_rows
        skipped += step.num_rows == 0
    replay_layers = plan.num_layers - plan.cut
    full = tokens * plan.num_layers
    return Saving(tokens, kept, skipped, steps, full - (tokens - kept) * replay_layers, full)


def address_check(config: Any, text_config: Any) -> dict[str, Any]:
    """Whether every KV block can be addressed: block ids times the page stride must stay below 2**32 bytes.

    The stride is estimated from the model's widths; the server checks the real one when it starts.
    """
    width = getattr(text_config, "head_dim", None)
    block = getattr(config.cache_config, "block_size", None)
    if not width or not block:
        return {}
    size = getattr(getattr(config.model_config, "dtype", None), "itemsize", 2)
    stride = int(block) * int(width) * int(size)
    bound = ADDRESS_RANGE // stride
    blocks = config.cache_config.num_gpu_blocks_override
    return {
        "block_tokens": int(block),
        "page_stride_bytes": stride,
        "max_blocks": bound,
        "max_tokens": bound * int(block),
        "num_gpu_blocks_override": blocks,
        "fits": None if blocks is None else blocks <= bound,
    }


# -- all together -------------------------------------------------------------------------------------------------


def examine(model: str | None, arguments: Sequence[str], tokens: Sequence[int]) -> Findings:
    """Find everything out. What cannot be is a reason, not an error."""
    from importlib.util import find_spec

    from vllm_ascend_replay.config import SettingError, read_settings
    from vllm_ascend_replay.layer_plan import NotDeepseekV41, read_layer_plan

    host = "ascend" if find_spec("vllm_ascend") else "reference" if find_spec("vllm") else None
    plugin_lines, wrong = plugins()
    found = Findings(versions(), host, device(), plugin_lines)
    found.reasons += wrong
    if host is None:
        found.reasons.insert(0, "vLLM is not installed; install vllm and vllm-ascend first")
    try:
        settings = read_settings()
    except SettingError as error:
        found.reasons.append(str(error))
        return found
    found.settings = asdict(settings)
    if not settings.enabled:
        found.reasons.append("it is switched off: ASCEND_REPLAY=0")
    if model is None:
        found.reasons.append("no model was named, so nothing more can be checked; give --model DIR")
        return found

    config = None
    if host is not None:
        try:
            with _quietly():
                config = engine_config(["--model", _directory(model), *arguments])
        except Exception as error:  # whatever vLLM and the platform plugin raise is the finding
            found.reasons.append(f"vLLM refuses this configuration here: {_in_a_line(error)}")
    try:
        text_config = config.model_config.hf_text_config if config is not None else model_json(model)
    except (ValueError, OSError) as error:
        found.reasons.append(f"the config.json of {model} cannot be read: {error}")
        return found
    if text_config is None:
        if config is None:
            found.notes.append(f"{model} has no config.json here, so its layers are unknown")
        return found
    try:
        plan = read_layer_plan(text_config)
        found.layer_plan = layer_plan_words(plan, settings)
    except (NotDeepseekV41, SettingError) as error:
        found.reasons.append(str(error))
        return found
    align, chunk = 1, 8192
    if config is not None:
        align = _alignment(host, config, found.notes)
        chunk = config.scheduler_config.max_num_batched_tokens
        _judge(found, config, plan, settings, host)
        found.graphs = _graphs(config, plan, settings, host, align)
        found.kv_address = address_check(config, text_config)
        if found.kv_address.get("fits") is False:
            found.reasons.append(
                f"{found.kv_address['num_gpu_blocks_override']} KV blocks of {found.kv_address['page_stride_bytes']} "
                f"bytes exceed the 2**32 bytes that can be addressed; at most {found.kv_address['max_blocks']} fit"
            )
    else:
        found.notes.append(f"without vLLM's configuration, chunks of {chunk} tokens are assumed")
    found.saving = [expected_saving(plan, settings, n, chunk=chunk, align=align) for n in tokens]
    return found


def _directory(model: str) -> str:
    """vLLM wants the directory of a configuration file."""
    path = Path(model)
    return str(path.parent) if path.is_file() else model


def _alignment(host: str | None, config: Any, notes: list[str]) -> int:
    """Multiples at which a window can begin; on A2/A3 that is a KV block."""
    if host != "ascend":
        return 1
    try:
        from vllm_ascend.utils import AscendDeviceType, get_ascend_device_type

        if get_ascend_device_type() == AscendDeviceType.A5:
            return 1
    except Exception as error:  # without a device, or where the name moved
        notes.append(f"the kind of NPU is unknown ({type(error).__name__}), so A2/A3 is assumed")
    notes.append("on A2/A3 a prompt keeps up to one KV block of rows more, since windows begin at a block")
    return int(config.cache_config.block_size or 1)


def _judge(found: Findings, config: Any, plan: LayerPlan, settings: ReplaySettings, host: str | None) -> None:
    """The feature table and the server's reasons."""
    from vllm_ascend_replay.support import GRAPH_GATES, Situation, gate_reasons

    facts: Any = None
    if host == "ascend":
        from vllm_ascend_replay import ascend

        facts = ascend.facts(config)
    situation = Situation(config, facts, plan, settings)
    reasons = gate_reasons(situation)
    if host == "ascend" and not reasons:
        from vllm_ascend_replay.ascend.seams import missing_seam

        moved = missing_seam()
        reasons = [("seam", moved)] if moved else []
    encoder = bool(getattr(config.cache_config, "swa_bounded_replay", False))
    if getattr(config.cache_config, "swa_bounded_replay", True) is False:
        found.reasons.append("it is switched off: --no-swa-bounded-replay")
    found.reasons += [reason for _, reason in reasons]
    found.reasons += _refused_settings(config, plan, settings)
    on = not found.reasons
    found.features.append(
        Feature("decoder replay", on, "" if on else found.reasons[0], TURN_ON.get(reasons[0][0], "") if reasons else "")
    )
    for name, reason in reasons[1:]:
        found.features.append(Feature("decoder replay, also", False, reason, TURN_ON.get(name, "")))
    graph_reasons = gate_reasons(situation, GRAPH_GATES)
    if not settings.graphs:
        found.features.append(
            Feature("replay graphs", False, "switched off: ASCEND_REPLAY_GRAPHS=0", "ASCEND_REPLAY_GRAPHS=1")
        )
    elif not getattr(config.compilation_config, "cudagraph_decoder_replay", True):
        flag = "compilation option cudagraph_decoder_replay"
        found.features.append(Feature("replay graphs", False, f"switched off: {flag}", f"{flag} true"))
    elif graph_reasons:
        name, reason = graph_reasons[0]
        found.features.append(Feature("replay graphs", False, reason, TURN_ON.get(name, "")))
    else:
        found.features.append(Feature("replay graphs", on, "" if on else "decoder replay is off"))
    lossless = settings.keep == "exact"
    found.features.append(
        Feature("lossless (exact)", on and lossless, "" if lossless else "not asked for", "ASCEND_REPLAY_KEEP=exact")
    )
    caching = bool(config.cache_config.enable_prefix_caching)
    words = "with the encoder side's replay" if encoder else "hits are capped" if caching else "not asked for"
    found.features.append(Feature("prefix caching", caching, words, "--enable-prefix-caching"))
    metrics = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
    words = "" if metrics else "workers cannot reach the server's /metrics"
    found.features.append(Feature("Prometheus counters", metrics, words, "PROMETHEUS_MULTIPROC_DIR=an empty directory"))


def _refused_settings(config: Any, plan: LayerPlan, settings: ReplaySettings) -> list[str]:
    """Settings with which the server would not start, in its words."""
    from vllm_ascend_replay.config import SettingError
    from vllm_ascend_replay.ladder import asked_sizes, break_out_size, check_sizes
    from vllm_ascend_replay.support import breakable_graphs_enabled

    compilation, refused = config.compilation_config, []
    try:
        name, sizes = asked_sizes(compilation, settings.graph_sizes)
        if sizes and settings.graphs and getattr(compilation, "cudagraph_decoder_replay", True):
            check_sizes(name, sizes, max_num_tokens=config.scheduler_config.max_num_batched_tokens)
    except SettingError as error:
        refused.append(str(error))
    try:
        if breakable_graphs_enabled():
            break_out_size(settings.policy, compilation, plan.window)
    except SettingError as error:
        refused.append(str(error))
    return refused


def _graphs(config: Any, plan: LayerPlan, settings: ReplaySettings, host: str | None, align: int) -> dict[str, Any]:
    """The ladder of graph sizes and what an Ascend device's streams hold of it."""
    from vllm_ascend_replay.ladder import asked_sizes, default_sizes, fit_sizes, max_buckets, prompt_rows

    keep = settings.keep_last(window=plan.window, num_late_layers=max(plan.num_late_layers, 0))
    scheduler, parallel = config.scheduler_config, config.parallel_config
    _, asked = asked_sizes(config.compilation_config, settings.graph_sizes)
    sizes = asked or default_sizes(
        window=plan.window,
        keep_last=keep,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        align=align,
    )
    pieces = plan.num_layers - plan.cut + 2
    groups = sum(n > 1 for n in (parallel.tensor_parallel_size, parallel.data_parallel_size))
    limit = max_buckets(streams=STREAMS if host == "ascend" else None, pieces=pieces, comm_groups=groups)
    fitted = fit_sizes(sizes, limit, needed=prompt_rows(keep, align))
    return {"sizes": list(sizes), "pieces_per_size": pieces, "max_sizes_by_streams": limit, "captured_sizes": fitted}


def show(console: Console, found: Findings) -> None:
    """The verdict first, then what it rests on."""
    from rich.table import Column, Table

    if found.runs:
        console.print("Decoder replay would run.", highlight=False)
    else:
        lines = [f"Decoder replay would not run: {found.reasons[0]}", *(f"  also: {r}" for r in found.reasons[1:])]
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    table = Table(show_header=False, title="found", title_justify="left")
    for name, version in found.versions.items():
        table.add_row(name, version or "not installed")
    hosts = {"ascend": "vllm-ascend", "reference": "the reference model only (vllm-ascend is not installed)"}
    table.add_row("host", hosts.get(found.host or "", "none"))
    table.add_row("tested with", TESTED.get(found.host or "", "-"))
    table.add_row("device", found.device)
    for line in found.plugins:
        group, _, name = line.partition(": ")
        table.add_row(group, name)
    for name, value in found.settings.items():
        table.add_row(f"setting {name}", str(value))
    for name, value in found.layer_plan.items():
        table.add_row(name.replace("_", " "), str(value))
    for name, value in found.graphs.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        table.add_row(f"graphs: {name.replace('_', ' ')}", "any number" if shown is None else str(shown))
    for name, value in found.kv_address.items():
        table.add_row(f"KV address: {name.replace('_', ' ')}", "not given" if value is None else f"{value}")
    console.print(table)

    if found.features:
        # What may be copied is not cut off on a narrow terminal.
        turned_on = Column("turned on by", overflow="fold")
        table = Table("feature", "", "why", turned_on, title="features", title_justify="left")
        for f in found.features:
            table.add_row(f.name, "on" if f.on else "off", f.reason, "" if f.on else f.turn_on)
        console.print(table)
    if found.saving:
        table = Table(title="one cold prompt, nothing else running", title_justify="left")
        for heading in ("tokens", "rows of the replay layers", "steps", "of them skipped", "layer-rows", "saved"):
            table.add_column(heading, justify="right", overflow="fold")
        for s in found.saving:
            saved = 1 - s.layer_rows / s.layer_rows_full
            counts = f"{s.tokens:,}", f"{s.kept_rows:,}", str(s.steps), str(s.skipped_steps)
            table.add_row(*counts, f"{s.layer_rows:,} of {s.layer_rows_full:,}", f"{saved:.1%}")
        console.print(table)
    for note in found.notes:
        console.print(f"Note: {note}.", highlight=False, markup=False, soft_wrap=True)


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(metavar="DIR_OR_CONFIG", help="The model's directory, or its config.json.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Prompt lengths to work the saving out for.")] = "1024,8192,65536",
    json_file: JsonFile = None,
) -> None:
    """Say whether replay would run, why not if not, and what it would save. Needs no device and no weights.

    Give it the server's arguments (vllm serve ...) and run it with the server's environment variables.

    Exit status: 0 replay would run, 1 it would not, 2 bad arguments.
    """
    lengths = positive_numbers(tokens, "--tokens")
    writable(json_file)
    if model is not None and os.sep in model and not Path(model).exists():
        raise typer.BadParameter(f"there is no {model}", param_hint="--model")
    if context.args and model is None:
        raise typer.BadParameter(f"{' '.join(context.args)}: engine arguments need --model", param_hint="--model")
    found = examine(model, context.args, lengths)
    show(wide_console(), found)
    first = found.reasons[0] if found.reasons else None
    write_json(json_file, {"runs": found.runs, "reason": first, **asdict(found)})
    raise typer.Exit(0 if found.runs else 1)
