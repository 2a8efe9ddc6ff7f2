"""Sample datasets that are made on this machine, so that training needs no network: one file each.

`dataset_name: NAME` runs `make(folder)` of samples/NAME.py once per cache folder. It writes train and validation files
of any format that `train_file` takes. `depends_on()` of the file, if there is one, returns what else the data depends
on: when that changes, it is made again. A class `Rows` computes rows when they are read instead
(engine/plan/computed_rows.py). A sample that `tokenizer_name` may name writes a folder tokenizer/, too. Delete
the ones that you do not need: engine/ finds them by listing this folder. Tests: tests/samples/.
"""
