"""The parameter server as a pure state machine: messages in, messages out."""
