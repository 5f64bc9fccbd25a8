"""The card of a model: what it is, how it was made, how to use it."""

from ping_llm.train.task import task_of
from ping_llm.train.trained import Trained

_COMPLETER = """Predicts round-trip times from measurements given as context. It has never seen a real measurement or an
address: it was trained on simulated Internets only (`dataset_type: worlds`), and works for any addresses."""
_TUNED = """Predicts round-trip times from measurements given as context. It was trained on simulated Internets and
then on measurements of a real one (`dataset_type: measured`), and works for any addresses."""
_LANGUAGE_MODEL = """A language model of latency measurements: sources, destinations, times and results as bytes. It
answers for RTTs, addresses and times alike, best for what it was trained on."""


def model_card(trained: Trained) -> str:
    """In Markdown."""
    task, config = task_of(trained.config), trained.config
    tuned = config.dataset_type == "measured"
    what = (_TUNED if tuned else _COMPLETER) if trained.is_completer else _LANGUAGE_MODEL
    sequences = f"{config.per_device_batch_size:g} {'contexts' if trained.is_completer else 'sequences'} a device"
    return f"""---
library_name: ping-llm
license: apache-2.0
---

# {config.run_name}

{what}

- {task.parameters / 1e6:.1f} million parameters: {task.description.replace("), ", ", ")}
- {trained.steps:,} steps of {sequences}, {config.opt_type}, learning rate {config.learning_rate:g}
- `config.yml` beside this card has every setting; weights are bfloat16 safetensors

```python
from ping_llm.predict import Predictor

predictor = Predictor.from_pretrained("this-folder")
predictor.predict_df(questions, history="my_pings.csv", quantile_levels=[0.1, 0.5, 0.9])
```
"""
