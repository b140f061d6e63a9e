"""Scores a model on tasks with known answers, through the engine or over HTTP.

`task` says what a task is, `tasks/` holds them, `ask` gets the answers, `report` counts. Published
tasks (`published`, `published_run`, `table`) also weigh endings; `lm_eval_tasks` runs lm-eval's.
"""
