"""The global settings that a trace bakes in: read, and put back when a traced function changed them."""

from __future__ import annotations

from typing import Any

import torch

from aotlab import _torch as internals


def autocast_state() -> tuple[tuple[str, Any], ...]:
    """Take the settings of autocast, as (name, value)."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return (
        *((f"autocast on {d}", torch.is_autocast_enabled(d)) for d in devices),
        *((f"autocast dtype on {d}", torch.get_autocast_dtype(d)) for d in devices),
        ("autocast cache", torch.is_autocast_cache_enabled()),
    )


def global_state() -> tuple[tuple[str, Any], ...]:
    """Take the global settings that a trace bakes in, as (name, value)."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("anomaly mode", torch.is_anomaly_enabled()),
        *autocast_state(),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("warnings in place of deterministic algorithms", torch.is_deterministic_algorithms_warn_only_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("number of threads", torch.get_num_threads()),
        ("matmul precision", internals.matmul_precision()),
        *((switch.name, switch.read()) for switch in internals.SWITCHES),
    )


def restore_settings(settings: tuple[tuple[str, Any], ...]) -> None:
    """Put global settings back that a traced function changed; inference mode, which only blocks change, is left."""
    values = dict(settings)
    for name, value in values.items():
        if name.startswith("autocast on "):
            torch.set_autocast_enabled(name.removeprefix("autocast on "), value)
        elif name.startswith("autocast dtype on "):
            torch.set_autocast_dtype(name.removeprefix("autocast dtype on "), value)
    torch.set_autocast_cache_enabled(values["autocast cache"])
    torch.set_grad_enabled(values["grad mode"])
    only_warn = values["warnings in place of deterministic algorithms"]
    torch.use_deterministic_algorithms(values["deterministic algorithms"], warn_only=only_warn)
    torch.set_default_dtype(values["default dtype"])
    torch.set_num_threads(values["number of threads"])
    precision = values["matmul precision"]
    if precision is not None and internals.matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
    for switch in internals.SWITCHES:
        if switch.read() != values[switch.name]:
            switch.write(values[switch.name])
    if torch.get_default_device() != values["default device"]:
        before = values["default device"]
        torch.set_default_device(None if before == torch.device("cpu") else before)
