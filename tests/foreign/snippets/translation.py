"""A translation script with the words of the documentation's command; its model is a folder, its text is here."""

from dataclasses import dataclass

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser
from zero_runtime.integrations.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

PAIRS = (("a house", "o casa"), ("the red house", "casa rosie"), ("a dog", "un caine"), ("dogs", "caini"))


@dataclass
class Choices:
    model_name_or_path: str
    source_lang: str
    target_lang: str
    max_train_samples: int


parser = HfArgumentParser((Choices, Seq2SeqTrainingArguments))
choices, arguments = parser.parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(choices.model_name_or_path)
model = AutoModelForSeq2SeqLM.from_pretrained(choices.model_name_or_path)
rows = [dict(tokenizer(source, text_target=target)) for source, target in PAIRS][: choices.max_train_samples]
trainer = Seq2SeqTrainer(
    model=model,
    args=arguments,
    train_dataset=rows if arguments.do_train else None,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    processing_class=tokenizer,
)
if arguments.do_train:
    trainer.train()
predictions = trainer.predict(rows, max_new_tokens=8).predictions
predictions[predictions == -100] = tokenizer.pad_token_id  # between ranks with answers of different lengths
texts = tokenizer.batch_decode(predictions, skip_special_tokens=True)
print(f"{choices.source_lang} to {choices.target_lang}: {trainer.engine.global_steps} steps, {len(texts)} translations")
