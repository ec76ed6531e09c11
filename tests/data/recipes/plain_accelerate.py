import accelerate

import fsdp


def train(accelerator: accelerate.Accelerator, model, optimizer, scheduler, loader, folder, max_norm=1.0):
    """Train without `fsdp.accelerate`."""
    # In evaluation mode, because DDP would wrap the model otherwise.
    model = accelerator.prepare_model(model, evaluation_mode=True, device_placement=False)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                model.clip_grad_norm_(max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    # accelerator.save_state would save only rank 0's part of the optimizer.
    fsdp.save(folder, model, optimizer.optimizer, values=scheduler.state_dict())
    return model
