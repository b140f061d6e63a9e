"""Measures servers over HTTP, and engines of our own.

`datasets` makes the requests, `http` and `openai` send them and read responses, `load` says when,
`figures` turns times into numbers, `layout` prints them. `serve` is the whole of it. `chat` sends
`conversations` instead of single requests, `chat_report` is what they show.
"""
