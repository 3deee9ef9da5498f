"""lm-eval's classes for OpenAI's API, on tasks that are made here: one chooses answers by their
likelihood, one generates them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import session

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = 12
CHOICES = ("glass", "river", "amber stone")


def write_tasks(folder: Path) -> None:
    data = folder / "questions.jsonl"
    lines = [
        {"question": session.text(number, 12), "choices": CHOICES, "answer": number % len(CHOICES)}
        for number in range(QUESTIONS)
    ]
    data.write_text("\n".join(map(json.dumps, lines)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1},
    }
    chosen = {
        "task": "chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    made = {
        "task": "made",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 16, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (chosen, made):
        # JSON is YAML.
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**common, **task}))


def ask(url: str, model: str) -> None:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        tasks = TaskManager(include_path=folder, include_defaults=False)
        for name, route, wanted in (
            ("local-completions", "completions", ["chosen", "made"]),
            ("local-chat-completions", "chat/completions", ["made"]),
        ):
            arguments = {
                "model": "tiny",
                "base_url": f"{url}/v1/{route}",
                "tokenizer": model,
                "num_concurrent": 4,
                "max_retries": 1,
                "max_length": 1024,
            }
            evaluated = lm_eval.simple_evaluate(
                model=name,
                model_args=arguments,
                tasks=wanted,
                task_manager=tasks,
                apply_chat_template=name == "local-chat-completions",
                bootstrap_iters=0,
            )
            for task in wanted:
                found[f"{name}: {task}"] = evaluated["results"][task]
                found[f"{name}: answers of {task}"] = [
                    sample["resps"] for sample in evaluated["samples"][task]
                ]
    session.tell(
        "lm_eval",
        f"{QUESTIONS} questions: choices by likelihood, and answers; text and chat",
        found,
    )


session.run(ask)
