"""One question of lm-eval at the URL that is given; print the share that gets the answer that is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate

url, answer = sys.argv[1:]
Path("task.jsonl").write_text(json.dumps({"question": "Greet.", "answer": answer}))
task = {
    "task": "greeting",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "task.jsonl"}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "exact_match"}],
}
found = simple_evaluate(
    model="local-chat-completions",
    model_args={"model": "tiny", "base_url": url},
    tasks=[task],
    apply_chat_template=True,
)
print("exact_match", found["results"]["greeting"]["exact_match,none"])
