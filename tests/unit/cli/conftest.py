"""What the tests of the chat share."""

import threading

import pytest
from chat_server import FakeServer


@pytest.fixture
def server():
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()
