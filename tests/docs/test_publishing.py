"""The command with which docs/convert.md publishes a folder, against a hub of the test's own."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("huggingface_hub")
DOCUMENT = Path(__file__).parents[2] / "docs/convert.md"


class Hub(BaseHTTPRequestHandler):
    """Takes what is uploaded, each file as a whole in the commit: the real hub stores large ones
    elsewhere.
    """

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"]))
        here = f"http://127.0.0.1:{self.server.server_port}/me/a-model"
        if self.path.endswith("/create"):
            self.server.made = json.loads(body)
            self.answer({"url": here, "name": "me/a-model"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kept = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": name} | kept for name in names]})
        elif "/commit/" in self.path:
            rows = [json.loads(line)["value"] for line in body.splitlines()]
            files = [row for row in rows if "path" in row]
            self.server.files = {r["path"]: base64.b64decode(r["content"]) for r in files}
            self.answer({"success": True, "commitUrl": f"{here}/commit/1", "commitOid": "1" * 40})
        else:  # it has the model card's header checked
            self.answer({})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked, server.files, server.made = [], {}, {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_documented_command_publishes_every_file_in_private(hub, tmp_path):
    model = tmp_path / "MODEL"
    model.mkdir()
    content = {"config.json": b"{}", "README.md": b"# A model\n", "model.safetensors": b"\0\1" * 99}
    for name, data in content.items():
        (model / name).write_bytes(data)
    (line,) = re.findall(r"^    \S*(hf upload .*)$", DOCUMENT.read_text(), re.MULTILINE)
    words = shlex.split(line.replace("YOU/NAME", "me/a-model"))
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_of-a-test"}
    own |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [Path(sys.executable).with_name(words[0]), *words[1:]],
        cwd=tmp_path,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert hub.files == content
    assert hub.made["name"] == "a-model" and "private" in json.dumps(hub.made)
    assert {token for _, token in hub.asked} == {"Bearer hf_of-a-test"}
