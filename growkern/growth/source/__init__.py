"""Opens the checkpoints and models that growth reads."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.growth.source.config import check_config, check_layers, config_from, is_same
    from growkern.growth.source.config import load_config, read_config, read_generation
    from growkern.growth.source.config import refuse_misread
    from growkern.growth.source.distributed import SafeReader
    from growkern.growth.source.files import Header, INDEX_FILE, MOST_TENSORS, read_headers
    from growkern.growth.source.files import refuse_links_out, stays_in, STORED_DTYPES, Transposed
    from growkern.growth.source.files import weight_file
    from growkern.growth.source.formats import beside_weights, CONFIG_FILE, format_of
    from growkern.growth.source.formats import GENERATION_FILE, header_reader, MODULES_FILE
    from growkern.growth.source.formats import MOST_BYTES, Stamps, weight_files
    from growkern.growth.source.hub import hub_model, ID, is_hub_name, located, name_of
    from growkern.growth.source.hub import refuse_other_names
    from growkern.growth.source.live import FUNCTIONS, QUANTISED, refuse_computed
    from growkern.growth.source.loading import all_outputs, as_model, class_in, fits, Float64
    from growkern.growth.source.loading import image_shape, LARGEST, largest_difference, load_model
    from growkern.growth.source.loading import longest_of, random_inputs
    from growkern.growth.source.parts import Assembled, files_of, Parts, Run, Stacked
    from growkern.growth.source.refused import config_directory, METADATA_FILE, model_type_of
    from growkern.growth.source.refused import nearest_family
    from growkern.growth.source.refused import refuse_adapter_directory, refuse_adapters
    from growkern.growth.source.refused import scale_block, STATE_FILES
    from growkern.growth.source.source import open_source, refuse_unreadable, Source
    from growkern.growth.source.stored import check_names_and_shapes, entries_of, own_name
    from growkern.growth.source.stored import PIECE_BYTES, Read, read_entries, refuse_adapted
    from growkern.growth.source.stored import refuse_nonfinite, refuse_overflow, row_blocks
    from growkern.growth.source.stored import StoredTensor
# fmt: on

__getattr__ = opener(__name__, __file__)
