"""`until_disconnect`: work ends with its client, and whoever called it hears of nothing else."""

import asyncio

import pytest

from penstock.server.sse import ClientGone, until_disconnect


class Client:
    """Sends nothing, then leaves; `fails`: in a way that no server should."""

    def __init__(self, fails: bool = False) -> None:
        self.leaves = asyncio.Event()
        self._fails = fails

    async def receive(self):
        await self.leaves.wait()
        if self._fails:
            raise OSError("the connection broke")
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_leaves_ends_the_work(fails):
    async def run():
        client, ended = Client(fails), []

        async def work():
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("work")

        asyncio.get_running_loop().call_later(0.01, client.leaves.set)
        with pytest.raises(ClientGone):
            await until_disconnect(client.receive, work())
        assert ended == ["work"]
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0.01)  # the caller itself goes on

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_result_and_the_error_of_the_work_are_the_callers():
    async def give(value):
        await asyncio.sleep(0)
        if isinstance(value, Exception):
            raise value
        return value

    async def run():
        assert await until_disconnect(Client().receive, give(7)) == 7
        with pytest.raises(ValueError, match="seven"):
            await until_disconnect(Client().receive, give(ValueError("seven")))
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= 2, "nobody watches any more"

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_client_that_leaves_when_the_work_is_done_cancels_nothing():
    async def run():
        client = Client()

        async def work():
            await asyncio.sleep(0)
            client.leaves.set()
            return "done"

        assert await until_disconnect(client.receive, work()) == "done"
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_whoever_cancels_the_caller_is_heard_even_if_the_client_leaves_too():
    async def run():
        client = Client()
        caller = asyncio.create_task(until_disconnect(client.receive, asyncio.sleep(3600)))
        await asyncio.sleep(0.01)
        client.leaves.set()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller

    asyncio.run(asyncio.wait_for(run(), 60))
