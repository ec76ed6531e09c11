import torch

from fsdp.accelerate import Accelerator


def train(accelerator: Accelerator, model, optimizer, scheduler, loader, max_norm=1.0):
    """Train for one epoch. The optimizer was created from the parameters of the sharded model."""
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


@torch.no_grad()
def evaluate(accelerator: Accelerator, model, loader):
    """Return the mean loss over the data. Each row counts once."""
    model.eval()
    losses = []
    for batch in accelerator.prepare(loader):
        loss = model(**batch).loss.repeat(len(batch["input_ids"]))
        losses.append(accelerator.gather_for_metrics(loss))
    return torch.cat(losses).mean()


def export(accelerator: Accelerator, model, folder):
    """Save the unsharded model for `from_pretrained`, or the adapters of a model of `peft`."""
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()  # otherwise a rank could read files that rank 0 still writes
