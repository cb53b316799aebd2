"""Charles et al. 2024: fine-tuning large language models with user-level differential privacy."""
