import accelerate

import fsdp


def train(accelerator: accelerate.Accelerator, model, optimizer, scheduler, loader, folder, max_norm=1.0):
    """Without `fsdp.accelerate`: what must be told otherwise is told by hand."""
    model = accelerator.prepare_model(model, evaluation_mode=True, device_placement=False)  # or DDP would wrap it
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                model.clip_grad_norm_(max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    # accelerator.save_state would save the first rank's part of the optimizer only.
    fsdp.save(folder, model, optimizer.optimizer, values=scheduler.state_dict())
    return model
