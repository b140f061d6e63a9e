"""A chat template that never ends, or takes all memory, under a real server."""

import contextlib
import threading
import time

import psutil
from server_process import Server
from waiting import until

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
        num_healthy = 0
        while asking.is_alive():
            assert server.http.get("/health").status_code == 200
            num_healthy += asking.is_alive()
            time.sleep(0.05)
        assert answers[0].status_code == 400
        assert "took longer than 5 s" in answers[0].json()["error"]["message"]
        assert num_healthy >= 3  # a template that held up the server would hold up the second one
        assert ask(server, "hello").status_code == 200
        # And a signal while one spins stops the server, with all it started.
        started = psutil.Process(server.process.pid).children(recursive=True)
        asking = threading.Thread(target=lambda: _ignore(ask, server, "spin"))
        used = cpu_s(started)
        asking.start()
        until(lambda: cpu_s(started) > used + 0.2)
        assert server.stop() == 0
        asking.join()
        _, alive = psutil.wait_procs(started, timeout=240)
        assert not alive


def cpu_s(processes):
    return sum(process.cpu_times().user for process in processes)


def _ignore(work, *args):
    try:
        work(*args)
    except Exception:
        pass


def test_a_template_that_takes_all_memory_is_refused_with_words_at_the_start():
    server = Server("tiny", chat_template="{{ 'a' * 3000000000 }}")
    peak = 0
    process = psutil.Process(server.process.pid)

    def has_ended():
        nonlocal peak
        with contextlib.suppress(psutil.NoSuchProcess):
            peak = max(peak, process.memory_info().rss)
        return server.process.poll() is not None

    until(has_ended)
    log = server.log.read_text()
    assert server.stop() == 1
    assert "more than 1024 MiB of memory; name another one with --chat_template" in log
    assert "Traceback" not in log
    assert peak < 500 << 20
