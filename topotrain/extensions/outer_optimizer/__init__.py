"""Local SGD with an outer optimizer: worker groups train alone and exchange what they have learned."""
