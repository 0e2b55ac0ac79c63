"""Error bars for a model trained with the Hugging Face Trainer.

    pip install 'transformers[torch]'
    python examples/hugging_face_trainer.py

A tiny BERT learns which of three tokens is most frequent in a sentence; nothing is downloaded. The same errbar calls
work for any model with a classification head, and for data sets of the `datasets` library.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset, random_split
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import errbar

LENGTH = 12


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentences of the tokens 1 … 19; the label is the most frequent of the tokens 1, 2 and 3, counted from zero."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=generator)
        self.tokens = torch.randint(1, 20, (count, LENGTH), generator=generator)
        hints = torch.rand(count, LENGTH, generator=generator) < 0.3
        self.tokens = torch.where(hints, self.labels[:, None] + 1, self.tokens)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[index]}


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    train, held_out, test = random_split(
        Sentences(1200, seed=1), [800, 200, 200], generator=torch.Generator().manual_seed(2)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=10,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        trainer = Trainer(
            model=BertForSequenceClassification(config), args=arguments, train_dataset=train, eval_dataset=held_out
        )
        trainer.train()

    # The batches of the Trainer's loaders are mappings with "labels": errbar reads them as they are.
    information = errbar.collect(trainer.model, trainer.get_train_dataloader(), last_layers=2)
    posterior = errbar.condition(information, errbar.choose_prior(information))
    posterior = errbar.calibrate(posterior, trainer.get_eval_dataloader(), fit="temperature")

    batch = next(iter(torch.utils.data.DataLoader(test, batch_size=len(test))))
    prediction = posterior.predict(batch)
    print(f"{posterior.information.n_samples} samples, {posterior.information.n_parameters} parameters")
    print(f"accuracy {errbar.metrics.accuracy(prediction.pmf, batch['labels']):.3f}")
    print(f"expected calibration error {errbar.metrics.ece(prediction.pmf, batch['labels']):.3f}")
    for row in range(3):
        bars = ", ".join(
            f"{float(f):.3f} ± {float(s):.3f}" for f, s in zip(prediction.pmf[row], prediction.std[row], strict=True)
        )
        print(f"label {int(batch['labels'][row])}: {bars}")


if __name__ == "__main__":
    main()
