"""Fine-tune a converted model for text classification with a plain Trainer: nothing of ours but the model.

    primal-convert bert-base-uncased --layers last4 --output bert-primal
    python recipes/finetune_trainer.py bert-primal --train train.csv --eval eval.csv --output bert-primal-topics

Both files have the columns text and label. MODEL is a folder or a hub id; the code in it is run, so trust it first.
`--resume` goes on from the last checkpoint in OUTPUT.
"""

import argparse

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Fine-tune a converted model for text classification.")
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a converted model")
    parser.add_argument("--train", required=True, metavar="FILE.csv")
    parser.add_argument("--eval", required=True, metavar="FILE.csv")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-steps", type=int, default=-1, help="stop after so many steps, whatever the epochs")
    parser.add_argument("--save-steps", type=int, default=500, help="steps between checkpoints (default: 500)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in DIR")
    return parser.parse_args()


def accuracy(scored: EvalPrediction) -> dict[str, float]:
    """Part of the texts whose label has the highest score, 0..1."""
    return {"accuracy": float(np.mean(scored.predictions.argmax(-1) == scored.label_ids))}


def main() -> None:
    """Train, evaluate, save, and reload what was saved."""
    options = parse()
    data = load_dataset("csv", data_files={"train": options.train, "eval": options.eval})
    names = sorted({str(label) for label in data["train"]["label"]})
    index, texts = {name: i for i, name in enumerate(names)}, data["eval"][:4]["text"]
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model, trust_remote_code=True, num_labels=len(names), id2label=dict(enumerate(names)), label2id=index
    )
    data = data.map(
        lambda rows: {**tokenizer(rows["text"], truncation=True), "labels": [index[str(x)] for x in rows["label"]]},
        batched=True,
        remove_columns=["text", "label"],
    )
    arguments = TrainingArguments(
        options.output,
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",  # so that a run that is resumed with more steps equals one of so many
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        save_steps=options.save_steps,
        logging_steps=10,
        logging_first_step=True,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
        callbacks=[model.ksvd_callback()],  # loss_task and loss_ksvd beside loss
    )
    trainer.train(resume_from_checkpoint=options.resume)
    print(trainer.evaluate())
    trainer.save_model()  # weights, config, tokenizer and the layer's code

    reloaded = AutoModelForSequenceClassification.from_pretrained(options.output, trust_remote_code=True)
    batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    with torch.no_grad():
        before, after = (network.cpu().eval()(**batch).logits for network in (model, reloaded))
    torch.testing.assert_close(after, before)
    print(f"saved, and reloaded with the same predictions: {options.output}")


if __name__ == "__main__":
    main()
