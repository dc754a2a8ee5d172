"""Tasks of fine-tuning, one file each: what they read, which tensors come of it, and what an evaluation says.

Without transformers: a task gets the tokenizer that it needs.
"""

from megatron.finetuning.tasks import causal, classification, images, question_answering, text_to_text
from megatron.finetuning.tasks.task import File, Prepared, Task

TASKS: dict[str, Task] = {
    "text-to-text": text_to_text.TASK,
    "sequence-classification": classification.TASK,
    "causal-lm": causal.TASK,
    "question-answering": question_answering.TASK,
    "image-classification": images.TASK,
}

__all__ = ["TASKS", "File", "Prepared", "Task"]
