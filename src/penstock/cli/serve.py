"""`serve`: recipe + flags + YAML + `--set` -> `EngineConfig` -> the server."""

import argparse

from penstock import log
from penstock.cli.flags import settings
from penstock.config.launch import find_place, rank_secret
from penstock.config.load import given_settings
from penstock.config.recipe import recipe_named, with_recipe
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.hub.catalog import CATALOG
from penstock.hub.folder import TINY, local_folder

TINY_PROMPTS = (  # worded as it has learned them; it knows few other words
    "What is 12 + 30?",
    "Sort 5, 3, 9 from smallest to largest.",
    "What is the capital of France?",
)
_logger = log.get(__name__)


def run(args: argparse.Namespace) -> int:
    log.setup("http", getattr(args, "log_level", None))
    config = build_config(args)
    place = find_place(config.launcher)
    if place is not None:
        secret = rank_secret()
        if place.rank:
            from penstock.cli.launched import run_launched

            is_rank = config.data_parallel_size == 1
            return run_launched(place, secret, config.rank_interface, config.log_level, is_rank)
    config = with_model_fetched(config)
    from penstock.server.launch import serve

    status: int = serve(config, args.begun_at)
    return status


def build_config(args: argparse.Namespace) -> EngineConfig:
    """`args.needs_model`: refuse to fall back on the default model."""
    values, warnings = settings(args)
    for line in warnings:
        _logger.warning("%s", line)
    given = given_settings(values, args.config, args.set)
    if args.recipe is not None:
        given = with_recipe(recipe_named(args.recipe), given)
    config = EngineConfig.model_validate(given)
    if args.needs_model and "model" not in config.model_fields_set:
        raise ConfigError("MODEL is missing: name a model id or a checkpoint folder")
    return config


def with_model_fetched(config: EngineConfig) -> EngineConfig:
    """Fetch a model of the catalog now, where Ctrl-C still ends it at once.

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
            "%s. Serving the built-in '%s' instead: a test model of 3.5 M parameters that knows "
            "little more than '%s'; 'penstock serve MODEL' serves another one",
            *(error, TINY, "', '".join(TINY_PROMPTS)),
        )
        # A name that was chosen for another model would hide which one answers.
        return config.model_copy(update={"model": TINY, "served_model_name": None})
    return config
