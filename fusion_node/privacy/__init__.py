"""What a node can make of what it is sent: attacks on the data that nodes of each topology really get.

They are here so that nobody takes ownership for secrecy: ``fusion-node privacy-report`` runs them for anybody's model
and prompt, docs/privacy.md says what follows. The attacker is one node that does all that it should, keeps what it is
sent and what it computes, and has the model's public weights (fusion_node.engine.public_model).
"""
