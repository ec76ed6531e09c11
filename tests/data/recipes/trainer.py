from transformers import TrainingArguments

from fsdp.transformers import Trainer


def train(model, dataset, folder, resume=False, **options):
    """Train a sharded model and save checkpoints. `resume` continues from the newest."""
    arguments = TrainingArguments(output_dir=folder, **options)
    trainer = Trainer(model, arguments, train_dataset=dataset, eval_dataset=dataset)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model()  # unsharded, for from_pretrained
    return trainer
