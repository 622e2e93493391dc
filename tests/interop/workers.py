"""What worker processes of the tests run."""


