from transformers import TrainingArguments

from fsdp.transformers import Trainer


def train(model, dataset, folder, resume=False, **options):
    """Train a model that is sharded, saving now and then; `resume` goes on from the newest checkpoint."""
    arguments = TrainingArguments(output_dir=folder, **options)
    trainer = Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model()  # gathered, for from_pretrained
    return trainer
