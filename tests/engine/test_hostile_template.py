"""A chat template that never ends, or takes all memory, under a real server."""

import threading
import time

import psutil
from server_process import Server

SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SOMETIMES = "{% if 'spin' in messages[0].content %}" + SPIN + "{% endif %}{{ messages[0].content }}"
CHAT = "/v1/chat/completions"


def ask(server, text):
    messages = [{"role": "user", "content": text}]
    return server.http.post(CHAT, json={"messages": messages, "max_tokens": 1})


def test_a_template_that_never_ends_costs_its_request_alone():
    with Server("tiny", chat_template=SOMETIMES) as server:
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(server, "spin")))
        asking.start()
        slowest = 0.0
        while asking.is_alive():
            begun = time.monotonic()
            assert server.http.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
            time.sleep(0.05)
        assert answers[0].status_code == 400
        assert "took longer than 5 s" in answers[0].json()["error"]["message"]
        assert slowest < 4.0  # the template spins for 5 s
        assert ask(server, "hello").status_code == 200
        # And a signal while one spins stops the server, with all it started.
        started = psutil.Process(server.process.pid).children(recursive=True)
        asking = threading.Thread(target=lambda: _ignore(ask, server, "spin"))
        asking.start()
        time.sleep(0.5)
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 40
        asking.join()
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive


def _ignore(work, *args):
    try:
        work(*args)
    except Exception:
        pass


def test_a_template_that_takes_all_memory_is_refused_with_words_at_the_start():
    server = Server("tiny", chat_template="{{ 'a' * 3000000000 }}")
    peak = 0
    process = psutil.Process(server.process.pid)
    while server.process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    log = server.log.read_text()
    assert server.stop() == 1
    assert "more than 1024 MiB of memory; name another one with --chat_template" in log
    assert "Traceback" not in log
    assert peak < 500 << 20
