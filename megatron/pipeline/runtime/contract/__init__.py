"""The interfaces of stages and updates, their tensors, and traces of a run. All folders of the runtime use them."""
