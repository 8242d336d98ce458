"""
Train a language model with FR3E, as a recipe says:

    accelerate launch examples/train.py --config recipes/gsm8k_lora.yaml

`fr3e train` does the same, and more: it says what was wrong in one line, and with `--dry_run` what a run will do. Begin
here for a script of your own.
"""

from trl import ModelConfig, get_peft_config, get_quantization_config

from fr3e_trl import FR3EConfig, FR3ETrainer
from fr3e_trl.commands.data import FR3EScriptArguments, get_reward, load_examples, load_tokenizer
from fr3e_trl.commands.recipe import RecipeParser
from fr3e_trl.commands.train import checkpoint_to_resume, set_model_init
from fr3e_trl.generation.vllm_weights import end_engine

if __name__ == "__main__":
    parser = RecipeParser([FR3EScriptArguments, FR3EConfig, ModelConfig])
    script_args, training_args, model_args = parser.parse_args_and_config()
    set_model_init(training_args, model_args)
    tokenizer = load_tokenizer(model_args, training_args.trust_remote_code)
    trainer = FR3ETrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[get_reward(name) for name in script_args.reward_funcs],
        args=training_args,
        train_dataset=load_examples(script_args, script_args.dataset_train_split, tokenizer),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(training_args))
    trainer.save_model(training_args.output_dir)
    end_engine(trainer)  # of vLLM, where it is in this process
    trainer.accelerator.end_training()
