"""The engine: scheduler, paged block manager and model runner behind `add / abort / step`."""
