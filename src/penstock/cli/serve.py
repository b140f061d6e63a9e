"""`serve`: flags + YAML + `--set` -> `EngineConfig` -> the server."""

import argparse

from penstock import log
from penstock.cli.flags import settings
from penstock.config.load import load_config
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.hub.catalog import CATALOG
from penstock.hub.folder import TINY, local_folder

_logger = log.get(__name__)


def run(args: argparse.Namespace) -> int:
    log.setup("http", getattr(args, "log_level", None))
    config = with_model_fetched(build_config(args))
    from penstock.server.launch import serve

    status: int = serve(config, args.begun_at)
    return status


def build_config(args: argparse.Namespace) -> EngineConfig:
    """`args.needs_model`: refuse to fall back on the default model."""
    values, warnings = settings(args)
    for line in warnings:
        _logger.warning("%s", line)
    config = load_config(values, args.config, args.set)
    if args.needs_model and "model" not in config.model_fields_set:
        raise ConfigError("MODEL is missing: name a model id or a checkpoint folder")
    return config


def with_model_fetched(config: EngineConfig) -> EngineConfig:
    """Fetch a model of the catalogue now, where Ctrl-C still ends it at once.

    Where the user named no model and the default one cannot be had, the built-in one is served.
    """
    if config.model not in CATALOG:
        return config
    try:
        local_folder(config.model)
    except ConfigError as error:
        if "model" in config.model_fields_set:
            raise
        _logger.warning(
            "%s. Serving the built-in '%s' instead: a test model of 3.5 M parameters that adds, "
            "sorts, knows a few capitals, writes JSON and calls tools, but little else; "
            "'penstock serve MODEL' serves another one",
            *(error, TINY),
        )
        return config.model_copy(update={"model": TINY})
    return config
