from __future__ import annotations

import http.server
import json
from pathlib import Path
from typing import ClassVar

SHA = "0123456789abcdef0123456789abcdef01234567"
TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **changes}))
    return folder


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Speaks as much of the Hub's protocol as a model download needs."""

    files: ClassVar[dict[str, dict[str, bytes]]] = {}
    gated: ClassVar[set[str]] = set()
    asked: ClassVar[list[str]] = []

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            repo = "/".join(path.split("/")[3:5])
            if repo not in self.files:
                return self.reply(404, b"{}", with_body, code="RepoNotFound")
            if "/revision/nope" in path:
                return self.reply(404, b"{}", with_body, code="RevisionNotFound")
            listing = [{"rfilename": name} for name in self.files[repo]]
            return self.reply(200, json.dumps({"id": repo, "sha": SHA, "siblings": listing}).encode(), with_body)
        parts = path.strip("/").split("/")
        repo, name = "/".join(parts[:2]), "/".join(parts[4:])
        if repo in self.gated:
            return self.reply(403, b"", with_body, code="GatedRepo")
        if repo not in self.files:
            return self.reply(404, b"", with_body, code="RepoNotFound")
        if name not in self.files[repo]:
            return self.reply(404, b"", with_body, code="EntryNotFound")
        return self.reply(200, self.files[repo][name], with_body)

    def reply(self, status: int, body: bytes, with_body: bool, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body) & 0xFFFFFFFF:x}"')
        self.send_header("X-Repo-Commit", SHA)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if with_body:
            self.wfile.write(body)
