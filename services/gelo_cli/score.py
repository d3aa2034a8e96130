"""`gelo score`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gelo_cli.console import CliError, out, progress_bars, reported_errors, set_up_logging
from gelo_cli.options import (
    EngineChoice,
    EngineOption,
    IntegrityOption,
    LpnMemoryOption,
    LpnPoolsOption,
    LpnWeightsChoice,
    LpnWeightsOption,
    MaxLenOption,
    ModelOption,
    ProtectionChoice,
    ProtectionOption,
    TransportChoice,
    TransportOption,
)
from gelo_cli.processes import started
from tee_runner.protection.lpn.options import DEFAULT_MEMORY

_MAX_TEXT_BYTES = 64 << 20


def score(
    text: Annotated[Path, typer.Option(help="UTF-8 text file to score.", exists=True, dir_okay=False)],
    model: ModelOption = "smollm2-135m-instruct",
    protection: ProtectionOption = ProtectionChoice.LPN,
    engine: EngineOption = EngineChoice.CPU,
    transport: TransportOption = TransportChoice.AUTO,
    max_len: MaxLenOption = 0,
    integrity: IntegrityOption = True,
    lpn_memory: LpnMemoryOption = DEFAULT_MEMORY,
    lpn_weights: LpnWeightsOption = LpnWeightsChoice.INT8,
    lpn_pools: LpnPoolsOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, floats in full precision.")
    ] = False,
) -> None:
    """Log-probability of each next token of a text, computed through a worker under a scheme.

    Starts a worker of its own. The way to compare schemes with each other and with other programs.
    """
    set_up_logging("warning")
    with reported_errors():
        from tee_runner.engine.runtime import Runtime, RuntimeOptions
        from tee_runner.engine.score import score as score_tokens
        from tee_runner.models import load_model, resolve_model
        from tee_runner.protection.integrity import DEFAULT_PROBES
        from tee_runner.protection.lpn.options import LpnOptions

        content = _read(text)
        with progress_bars() as progress:
            loaded = load_model(resolve_model(model, progress=progress), progress=progress)
            tokens = loaded.tokenizer.encode(content, add_special_tokens=True)
            arguments = [
                "worker",
                "--listen",
                "127.0.0.1:0",
                "--engine",
                engine.value,
                "--log-level",
                "error",
            ]
            with started(arguments) as worker:
                options = RuntimeOptions(
                    worker=f"127.0.0.1:{worker.ready['port']}",
                    protection=protection.value,
                    transport=transport.value,
                    max_sequences=1,
                    integrity_probes=DEFAULT_PROBES if integrity else 0,
                    max_len=max_len or loaded.config.max_position_embeddings,
                    lpn=LpnOptions(
                        bytes_per_parameter=lpn_memory,
                        wide_weights=lpn_weights is LpnWeightsChoice.INT16,
                        pool_directory=lpn_pools,
                    ),
                )
                runtime = Runtime(loaded, options, progress)
                try:
                    runtime.connect(progress)
                    result = score_tokens(runtime, tokens, progress)
                finally:
                    runtime.close()
    if as_json:
        document = {
            "model_identity": loaded.identity.hex(),
            "protection": protection.value,
            "tokens": result.tokens,
            "log_probs": result.log_probs,
            "nll": result.nll,
        }
        out.file.write(json.dumps(document) + "\n")
        return
    pairs = zip(result.tokens[1:], result.log_probs, strict=True)
    out.file.writelines(f"{token}\t{value!r}\n" for token, value in pairs)
    out.file.write(f"mean NLL {result.nll!r} over {len(result.log_probs)} tokens\n")


def _read(path: Path) -> str:
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise CliError(f"{path} is larger than {_MAX_TEXT_BYTES} bytes.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CliError(f"{path} is not UTF-8 text.") from None
