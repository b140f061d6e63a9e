"""`penstock recipes`: the published recipes that `penstock serve --recipe NAME` knows."""

import argparse
import json

from penstock.config.recipe import Recipe, recipe_named, recipe_names


def run(args: argparse.Namespace) -> int:
    if args.name is not None:
        print(recipe_named(args.name).path.read_text(encoding="utf-8"), end="")
        return 0
    recipes = [recipe_named(name) for name in recipe_names()]
    if args.json:
        print(json.dumps([_record(one) for one in recipes], indent=2))
    else:
        _show(recipes)
    return 0


def _record(recipe: Recipe) -> dict[str, object]:
    return {
        **{"name": recipe.name, "model": recipe.model, "gpus": recipe.gpus},
        **{"about": recipe.about, "settings": recipe.settings},
    }


def _show(recipes: list[Recipe]) -> None:
    rows = [("NAME", "MODEL", "GPUS", "WHAT DIFFERS")]
    rows += [(one.name, one.model, one.gpus, one.about) for one in recipes]
    name, model, gpus = (max(len(row[column]) for row in rows) for column in range(3))
    for row in rows:
        print(f"{row[0]:<{name}}  {row[1]:<{model}}  {row[2]:<{gpus}}  {row[3]}")
    print("\n'penstock recipes NAME' prints one, 'penstock serve --recipe NAME' serves it.")
