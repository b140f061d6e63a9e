"""`GET /`: says what runs here. A small page for a browser, the same as JSON for programs.

Plain HTML without scripts and without anything from elsewhere.
"""

import html
import json

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import penstock
from penstock.server.report import curl_command
from penstock.server.state import state_of

_LINKS = (
    ("/docs", "what can be asked, with a command for each"),
    ("/v1/models", "the model"),
    ("/version", "settings with reasons, limits, memory, start-up times"),
    ("/prometheus/metrics", "metrics"),
    ("/health", "health"),
)
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


async def favicon(request: Request) -> Response:
    """Browsers ask for one; there is none, which is no error."""
    return Response(status_code=204, headers={"cache-control": "max-age=86400"})


async def front_page(request: Request) -> Response:
    state = state_of(request)
    client = state.pipeline.client
    status = "ready" if client.is_healthy() else "not making progress"
    num_running, num_waiting = client.counters.running, client.counters.waiting
    if "text/html" not in request.headers.get("accept", ""):
        said = {
            "server": "penstock",
            "version": penstock.__version__,
            "model": state.model_name,
            "status": status,
            "running": num_running,
            "waiting": num_waiting,
            "links": [path for path, _ in _LINKS],
        }
        return Response(msgspec.json.encode(said), media_type="application/json")
    curl = curl_command(
        state.pipeline, state.model_name, str(request.base_url).rstrip("/"), state.has_key
    )
    page = _PAGE.format(
        model=html.escape(state.model_name),
        version=html.escape(penstock.__version__),
        status=html.escape(status),
        device=html.escape(client.info.device),
        max_seq_len=client.info.max_seq_len,
        running=f"{num_running} request{'' if num_running == 1 else 's'}",
        num_waiting=num_waiting,
        curl=html.escape(curl),
        base_url=html.escape(json.dumps(f"{request.base_url}v1")),
        links="\n".join(
            f'<li><a href="{path}">{path}</a>: {html.escape(text)}</li>' for path, text in _LINKS
        ),
    )
    return HTMLResponse(page, headers=HEADERS)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{model} - Penstock</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto }}
pre {{ background: #f3f3f3; color: #111; padding: 1rem; white-space: pre-wrap }}
</style>
</head>
<body>
<h1>{model}</h1>
<p>Penstock {version}: {status}. {running} running, {num_waiting} waiting, on
{device}; up to {max_seq_len} tokens each.</p>
<p>Ask it:</p>
<pre>{curl}</pre>
<p>Clients of OpenAI's API: <code>base_url={base_url}</code>.</p>
<ul>
{links}
</ul>
<p>More documentation is in the folder <code>docs</code> of the source.</p>
</body>
</html>
"""
