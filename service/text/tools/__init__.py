"""Function tools in chat: what clients say of them, and how a model's template has it call them."""
