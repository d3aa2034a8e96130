"""What crosses to the worker and how it is protected: one interface, several schemes."""
