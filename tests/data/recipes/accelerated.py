import torch

from fsdp.accelerate import Accelerator


def train(accelerator: Accelerator, model, optimizer, scheduler, loader, max_norm=1.0):
    """One pass over the data; the optimizer was made from the parameters of the model, which is sharded."""
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
    """The mean loss over the data, each row counted once."""
    model.eval()
    losses = []
    for batch in accelerator.prepare(loader):
        loss = model(**batch).loss.repeat(len(batch["input_ids"]))
        losses.append(accelerator.gather_for_metrics(loss))
    return torch.cat(losses).mean()


def export(accelerator: Accelerator, model, folder):
    """Save the model, gathered, for `from_pretrained`; of a model of `peft` the adapters."""
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()  # or a rank could read what the first one still writes
