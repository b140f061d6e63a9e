"""A logits processor of another package, found by its entry point, through a real server."""

import textwrap

from server_process import Server

PLUGIN = """
    class Alternate:
        '''Every other token is `token_id`.'''

        def __init__(self, vocab_size, device):
            self.rows = {}

        def join(self, row, args, prompt_ids, output_ids):
            self.rows[row] = [int(args["token_id"]), len(output_ids)]

        def apply(self, logits, rows):
            for i, row in enumerate(rows):
                token_id, num_tokens = self.rows[row]
                if num_tokens % 2 == 0:
                    logits[i, token_id] = 1e4

        def on_tokens(self, rows, token_ids):
            assert len(token_ids.tolist()) == len(rows)
            for row in rows:
                self.rows[row][1] += 1
"""


def test_requests_use_it_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "alternate.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "alternate-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: alternate\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[penstock.logits_processors]\nalternate = alternate:Alternate\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = {"prompt": "The river", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    used = [{"qualname": "alternate", "kwargs": {"token_id": 100}}]
    drafting = {"decoding_type": "NGram", "max_draft_len": 2}
    with Server("tiny", logits_processors=["alternate"], speculative_config=drafting) as server:
        reply = server.post(
            "/v1/completions", **asked, return_token_ids=True, logits_processors=used
        )
        ids = reply["choices"][0]["token_ids"]
        assert len(ids) == 6 and ids[::2] == [100] * 3 and 100 not in ids[1::2]
        broken = server.http.post(
            "/v1/completions", json={**asked, "logits_processors": ["alternate"]}
        )
        assert broken.status_code == 503  # of the engine: it has no token_id
        plain = server.post("/v1/completions", **asked, return_token_ids=True)
        assert 100 not in plain["choices"][0]["token_ids"]
        unknown = server.http.post("/v1/completions", json={**asked, "logits_processors": ["x"]})
        assert unknown.status_code == 400 and "this server has alternate" in unknown.text
