"""GGUF files, as llama.cpp has them: each is read as the folder that its model was made from."""
